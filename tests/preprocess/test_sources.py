"""What files in requests may look like, before anything decodes them."""

from __future__ import annotations

import base64

import pytest

from jaxsgl.errors import InvalidRequest
from jaxsgl.preprocess.sources import Budget, data_of

CONTENT = bytes(range(256))


def data(text: str) -> bytes | tuple[bytes, ...]:
    return data_of(f"data:image/png;base64,{text}", ("image",), Budget(1000), "image 0")


@pytest.mark.parametrize("line_end", ["\n", "\r\n"])
def test_base64_may_come_in_lines_as_programs_write_it(line_end: str) -> None:
    assert data(base64.encodebytes(CONTENT).decode().replace("\n", line_end)) == CONTENT


@pytest.mark.parametrize("text", ["ab c", "abc", "ab-_"])
def test_other_text_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest, match="image 0 is no base64: encode the file again"):
        data(text)
