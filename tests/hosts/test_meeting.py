"""Hosts meet, agree, follow, and end together: both ends over loopback, without a device."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from jaxsgl.batch.buckets import BucketSet
from jaxsgl.errors import StartupError
from jaxsgl.hosts import line
from jaxsgl.hosts.calls import Choose
from jaxsgl.hosts.follower import Follower
from jaxsgl.hosts.leader import Leader
from jaxsgl.hosts.line import Line, LineLost, Pulse, greet
from jaxsgl.hosts.playing import LeadEngine
from jaxsgl.scheduler.loop import run_loop
from jaxsgl.scheduler.served_engine import StepsOnly
from jaxsgl.testing.engine import ScriptedMailbox
from tests.checked import CheckedScheduler
from tests.hosts.test_playing import SIZES, Recorded
from tests.hosts.world import FACTS, PATIENCE_S, World, connection, secret_file, wait_for
from tests.scheduler.serving import request


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Signs of life come often, and silence is noticed soon."""
    monkeypatch.setattr("jaxsgl.hosts.leader.PULSE_S", 0.02)
    monkeypatch.setattr("jaxsgl.hosts.follower.PULSE_S", 0.02)


def test_three_hosts_take_the_least_of_each_number_and_go_on_only_if_they_agree(
    tmp_path: Path, new_world: Callable[..., World]
) -> None:
    world = new_world(3, (secret_file(tmp_path, "s"),) * 3)
    world.start()
    assert world.everywhere(lambda host: host.least("the memory", (10 - host.rank, host.rank))) == [(8, 0)] * 3
    assert world.everywhere(lambda host: host.same("the devices", "4 x CPU", "")) == [None] * 3
    names = world.everywhere(lambda host: host.all_of("the names", f"n{host.rank}"))
    assert names == [("n0", "n1", "n2")] * 3
    errors = world.everywhere(lambda host: host.same("the models", f"m{host.rank // 2}", "give all the same") or 0)
    assert isinstance(errors[0], StartupError)
    assert str(errors[0]) == "the models are m1 on host 2 (127.0.0.1), but m0 on host 0: give all the same"
    for report in world.reports[1:]:
        failures = report.failures
        assert wait_for(failures.copy) == [f"host 0 failed: {errors[0]}"]


def test_calls_of_the_loop_reach_the_other_host_and_it_yields_the_same(
    quick: None, new_world: Callable[..., World]
) -> None:
    world = new_world(2)
    leader, (follower,) = world.start()
    engines = [Recorded(), Recorded()]
    scheduler = CheckedScheduler(SIZES, BucketSet.derive(SIZES), ())
    playing = world.threads.submit(follower.play, engines[1])
    script = [[request("a", range(40), 20)], [request("b", range(9), 12)]]
    run_loop(scheduler, StepsOnly(LeadEngine(engines[0], leader.call)), ScriptedMailbox(script), 1)
    sent = len(engines[0].steps)
    loads = world.reports[0].loads
    load = wait_for(
        lambda: next((load for load in loads[-1:] if [host.lag_calls for host in load.hosts] == [0, 0]), None)
    )
    assert [host.rank for host in load.hosts] == [0, 1] and not load.leaving
    leader.end()
    playing.result(PATIENCE_S)
    assert wait_for(lambda: len(engines[1].tokens) == sent) and engines[1].tokens == engines[0].tokens
    assert not world.reports[0].failures and not world.reports[1].failures


def test_a_host_that_has_played_other_calls_ends_all(quick: None, new_world: Callable[..., World]) -> None:
    world = new_world(2)
    leader, (follower,) = world.start()
    leader.call(Choose(np.zeros((1, 2), np.uint32)))
    wait_for(lambda: follower._line.received[0])
    follower._played = Pulse(1, 12345)
    (text,) = wait_for(lambda: world.reports[0].failures)
    assert text.startswith("host 1 (127.0.0.1) has played 1 calls of checksum 12345, but ")


@pytest.mark.parametrize("lost", [0, 1])
def test_a_host_that_is_gone_is_named_to_the_front_end_of_the_others(
    lost: int, new_world: Callable[..., World]
) -> None:
    world = new_world(2)
    leader, (follower,) = world.start()
    connection = follower._line if lost else next(iter(leader._others.values())).line
    world.hosts[lost]._ending.set()  # this one dies silently
    connection.close()
    name = "host 1 (127.0.0.1)" if lost else "host 0"
    (text,) = wait_for(lambda: world.reports[1 - lost].failures)
    assert text.startswith(f"{name} is gone (")


def test_a_host_that_is_silent_counts_as_dead(monkeypatch: pytest.MonkeyPatch, new_world: Callable[..., World]) -> None:
    monkeypatch.setattr(line, "SILENCE_S", 0.3)
    monkeypatch.setattr("jaxsgl.hosts.leader.PULSE_S", 0.02)
    monkeypatch.setattr("jaxsgl.hosts.follower.PULSE_S", 60.0)
    world = new_world(2)
    world.start()
    (text,) = wait_for(lambda: world.reports[0].failures)
    assert text == "host 1 (127.0.0.1) has given no sign of life for 0.3 s"


def test_a_host_that_was_asked_to_stop_is_named_to_host_0(quick: None, new_world: Callable[..., World]) -> None:
    world = new_world(2)
    _, (follower,) = world.start()
    follower.leave()
    loads = world.reports[0].loads
    assert wait_for(lambda: [load.leaving for load in loads[-1:] if load.leaving]) == ["host 1 (127.0.0.1)"]


def test_hosts_of_other_flags_are_refused_with_all_values(new_world: Callable[..., World]) -> None:
    world = new_world(2)
    starting = [world.starting(0), world.starting(1, {**FACTS, "--page-size": "32"})]
    for each in starting:
        error = each.exception(PATIENCE_S)
        assert isinstance(error, StartupError)
        assert "--page-size is 32 on host 1 (127.0.0.1), but 16 on host 0: give all hosts the same flags" in str(error)


def test_a_host_with_another_secret_learns_why_it_is_refused_and_the_true_one_gets_in(
    tmp_path: Path, new_world: Callable[..., World]
) -> None:
    good, bad = secret_file(tmp_path, "g"), secret_file(tmp_path, "b")
    world = new_world(2, (good, bad))
    leading, refused = world.starting(0), world.starting(1)
    assert "has another --dist-secret-file" in str(refused.exception(PATIENCE_S))
    world.secrets = (good, good)
    following = world.starting(1)
    assert isinstance(leading.result(PATIENCE_S), Leader) and isinstance(following.result(PATIENCE_S), Follower)


def test_hosts_that_do_not_come_are_named(new_world: Callable[..., World]) -> None:
    world = new_world(3, timeout_s=0.5)
    assert "no sign of host 1, 2 within 0.5 s (--dist-timeout)" in str(world.starting(0).exception(PATIENCE_S))
    assert "no connection to host 0 at 127.0.0.1:" in str(world.starting(1).exception(PATIENCE_S))


def test_strangers_get_no_answer_and_nothing_of_theirs_is_decoded() -> None:
    with connection() as (stranger, ours):
        stranger.sendall(b"GET / HTTP/1.1\r\nHost: a.example.org\r\n\r\n")
        with pytest.raises(LineLost, match="which no host of jaxsgl does"):
            greet(ours, b"s" * 32, connects=False)
        stranger.settimeout(0.1)
        with pytest.raises(TimeoutError):
            stranger.recv(1)


def test_what_is_no_frame_ends_the_line() -> None:
    for sent in (b"x" * 16, line._HEAD.pack(line._MAGIC, 1 << 31, 0), line._HEAD.pack(line._MAGIC, 1, 0) + b"\xc1"):
        with connection() as (stranger, ours):
            stranger.sendall(sent)
            with pytest.raises(LineLost, match=r"no frame|another version"):
                Line(ours, "host 1").receive()


def test_large_arrays_pass_while_others_talk() -> None:
    masks = np.arange(1 << 20, dtype=np.uint32).reshape(256, -1)
    with connection() as (one, other):
        out, back = Line(one, "host 1"), Line(other, "host 0")
        talking = threading.Thread(target=lambda: list(map(out.send, map(Pulse, range(50)))))
        talking.start()
        sending = threading.Thread(target=out.send, args=(Choose(masks),))
        sending.start()
        found = [back.receive() for _ in range(51)]
        talking.join()
        sending.join()
    (choice,) = (each for each in found if isinstance(each, Choose))
    np.testing.assert_array_equal(choice.masks, masks)
    assert [each.num_calls for each in found if isinstance(each, Pulse)] == list(range(50))
