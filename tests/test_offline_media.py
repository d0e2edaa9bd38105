"""Conversations that `LLM.chat` gets become turns of the chat template and files, as in servers, or are refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from jaxsgl.errors import InvalidRequest
from jaxsgl.offline.chat import read_chat
from jaxsgl.offline.media import read_prompt
from jaxsgl.preprocess.sources import ImageFile, SoundFile, VideoFile
from jaxsgl.preprocess.waves import Wave


def text(said: str) -> dict[str, Any]:
    return {"type": "text", "text": said}


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def test_texts_of_several_parts_are_joined_by_line_breaks_unless_there_are_pictures_among_them() -> None:
    turns = [user("Hi"), user([text("a"), text("b")]), user([text("a"), {"type": "image", "image": b"x"}]), user([])]
    said, files = read_chat([*turns, {"role": "assistant", "content": None}])
    assert [turn["content"] for turn in said] == ["Hi", "a\nb", [text("a"), {"type": "image"}], "", ""]
    assert files == [ImageFile(b"x")]


def test_frames_a_second_may_stand_in_a_part_or_beside_its_url() -> None:
    parts = [
        {"type": "video", "video": [b"a", b"b"], "fps": 4},
        {"type": "video_url", "video_url": {"url": b"c", "fps": 0.5}},
        {"type": "video", "video": b"d"},
    ]
    _, files = read_chat([user(parts)])
    assert files == [VideoFile((b"a", b"b"), 4.0), VideoFile(b"c", 0.5), VideoFile(b"d")]


def test_sounds_are_files_or_samples_as_in_vllm_or_openais_parts() -> None:
    samples = np.linspace(-1, 1, 70_000, dtype=np.float32)
    (of_one,), (of_list, other) = (
        read_prompt({"prompt": "a", "multi_modal_data": {"audio": audio}}).files
        for audio in ((samples, 22_050.0), [(samples.astype(np.float64), np.int64(22_050)), b"file"])
    )
    assert isinstance(of_one, SoundFile) and of_one == of_list and other == SoundFile(b"file")
    wave = Wave(of_one.content, "a")
    assert wave.rate == 22_050
    np.testing.assert_array_equal(np.concatenate(list(wave.blocks())), samples[:, None])
    part = {"type": "input_audio", "input_audio": {"data": "YWJj", "format": "wav"}}
    assert read_chat([user([part])]) == ([user([{"type": "audio", "audio": ""}])], [SoundFile(b"abc")])


@pytest.mark.parametrize(
    ("sound", "words"),
    [
        (np.zeros(9), "a sound is a ndarray, but must be bytes, a path, a data: URL, or samples and their rate"),
        (
            (np.zeros((2, 9)), 16_000),
            r"a sound have the shape \(2, 9\), .* but must be floats of -1 to 1 of one",
        ),
        ((np.zeros(9, np.int16), 16_000), "the type int16"),
        ((np.zeros(9), float("nan")), "the rate nan"),
        ((np.zeros(9), -5), "the rate -5"),
        ("https://a.org/a.wav", "the sound https://a.org/a.wav is a URL, but nothing is fetched here: give bytes"),
        ("/none.wav", "the sound /none.wav can't be read"),
    ],
)
def test_what_is_no_sound_is_refused_as_one(sound: Any, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        read_prompt({"prompt": "a", "multi_modal_data": {"audio": sound}})


def test_calls_and_their_results_reach_the_template_with_arguments_as_objects() -> None:
    function = {"name": "f", "arguments": '{"a": 1}'}
    calls = [{"id": "1", "type": "function", "function": function}, {"function": {"name": "g"}}]
    turns: list[dict[str, Any]] = [
        {"role": "assistant", "content": None, "reasoning_content": "so", "tool_calls": calls},
        {"role": "tool", "content": "3", "tool_call_id": "1", "name": "f"},
    ]
    said, _ = read_chat(turns)
    first, second = [{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]
    read = [{"id": "1", "type": "function", "function": first}, {"type": "function", "function": second}]
    assert said == [{"role": "assistant", "content": "", "reasoning_content": "so", "tool_calls": read}, turns[1]]


@pytest.mark.parametrize(
    ("turn", "words"),
    [
        ("hi", "a turn is a str, but must be"),
        ({"role": "user"}, r"a turn has the keys \['role'\], but needs role and content"),
        ({"role": "user", "content": "a", "text": "b"}, "but needs role and content, or tool_calls, and may have name"),
        ({"role": "assistant", "tool_calls": ["a"]}, "a call must be as .*, not 'a'"),
        (
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[1]"}}]},
            "of f are no JSON object",
        ),
        (user(5), "a content is a int, but must be a text or a list of parts"),
        (user(["hi"]), "a part is a str, but must be as"),
        (user([{"type": "text"}]), "a part is of type text without a text"),
        (user([{"type": "text", "text": 5}]), "a part is of type text without a text"),
        (user([{"type": "input_audio", "input_audio": "YWJj"}]), "a part is of type input_audio without data"),
        (user([{"type": "sound"}]), "a part is of type 'sound', but must be text, image"),
        (user([{"type": "image"}]), "a picture is a NoneType, but must be a PIL image"),
        (user([{"type": "video", "video": [b"x"], "fps": "2"}]), r"fps is '2', but must be a number of 0\.001 to 1000"),
        (user([{"type": "video", "video": [b"x"], "fps": 0}]), "fps is 0, but must be"),
        (user([{"type": "video", "video": [b"x"], "fps": True}]), "fps is True, but must be"),
    ],
)
def test_what_is_no_turn_or_part_is_refused(turn: Any, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        read_chat([turn])
