from __future__ import annotations

from pathlib import Path

import pytest
from google.protobuf import descriptor_pb2

from jaxsgl.frontend.proto import jaxsgl_pb2
from jaxsgl.requests.request import FinishReason

pytestmark = pytest.mark.unit

ROOT = Path(__file__).resolve().parents[2]
PROTO = "jaxsgl/frontend/proto/jaxsgl.proto"


def test_generated_code_is_up_to_date(tmp_path: Path) -> None:
    protoc = pytest.importorskip("grpc_tools.protoc")
    output = tmp_path / "descriptor"
    assert protoc.main(["protoc", f"-I{ROOT}", f"--descriptor_set_out={output}", PROTO]) == 0
    (fresh,) = descriptor_pb2.FileDescriptorSet.FromString(output.read_bytes()).file
    committed = descriptor_pb2.FileDescriptorProto()
    jaxsgl_pb2.DESCRIPTOR.CopyToProto(committed)
    for message in fresh.message_type:
        for field in [*message.field, *(field for nested in message.nested_type for field in nested.field)]:
            field.ClearField("json_name")  # protoc adds it; generated code leaves it out
    assert committed == fresh, "run scripts/make proto"


def test_every_finish_reason_has_its_own_value() -> None:
    names = {name.removeprefix("FINISH_REASON_") for name in jaxsgl_pb2.FinishReason.DESCRIPTOR.values_by_name}
    assert names == {reason.name for reason in FinishReason} | {"UNSPECIFIED"}
