from __future__ import annotations

from jaxsgl.engine.devices import tpu_variables


def test_replicas_on_one_host_take_chips_and_ports_of_their_own() -> None:
    """No TPU has run this; the variables are those of JAX's own tests with several processes."""
    replicas = [tpu_variables(ids) for ids in ((0, 1, 2, 3), (4, 5, 6, 7))]
    assert [variables["TPU_VISIBLE_CHIPS"] for variables in replicas] == ["0,1,2,3", "4,5,6,7"]
    assert {variables["TPU_CHIPS_PER_PROCESS_BOUNDS"] for variables in replicas} == {"2,2,1"}
    assert len({variables["TPU_PROCESS_PORT"] for variables in replicas}) == 2
    assert tpu_variables((0, 1, 2)) == {}, "three chips have no shape"
