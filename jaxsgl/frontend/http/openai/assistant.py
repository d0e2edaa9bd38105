"""The assistant's message of one sample, in OpenAI's form: reasoning, text and calls, whole or as deltas.

Owns the ids of calls and what a stream has sent. Never knows how a model writes: a parser takes its text apart.
chat.py feeds it pieces of text.
"""

from __future__ import annotations

from msgspec import UNSET

from jaxsgl.frontend.http.openai.replies import AssistantMessage, CalledFunction, Delta, DeltaCall, MessageCall
from jaxsgl.frontend.http.openai.tools import AnswerForm
from jaxsgl.text.answer import PlainParser
from jaxsgl.text.call_stream import Part


class MessageWriter:
    """Turns the text of one sample into a message.

    Attributes:
      has_calls: whether the message calls a tool.
    """

    def __init__(self, form: AnswerForm) -> None:
        self._form = form
        self._parser = form.parser()
        self._held_reasoning: list[str] = []
        self.has_calls = False

    def whole(self, text: str) -> AssistantMessage:
        """Returns the message that the sample's whole text makes."""
        reasoning, content = "", ""
        calls: list[MessageCall] = []
        for part in self._parts(text, final=True):
            match part.kind:
                case "reasoning":
                    reasoning += part.text
                case "content":
                    content += part.text
                case "call":
                    calls.append(MessageCall(self._form.new_call_id(), "function", CalledFunction("", part.text)))
                case "arguments":
                    calls[-1].function.arguments += part.text
        legacy = self._form.use.legacy
        return AssistantMessage(
            "assistant",
            None if not content and (calls or reasoning) else content,
            reasoning or UNSET,
            calls if calls and not legacy else UNSET,
            calls[0].function if calls and legacy else UNSET,
        )

    def delta(self, text: str, final: bool) -> Delta:
        """Returns what `text` adds to the message; `final`: nothing else follows."""
        if isinstance(self._parser, PlainParser):  # most answers, for each token
            return Delta(content=text or None)
        delta = Delta()
        calls: list[DeltaCall] = []
        for part in self._parts(text, final):
            match part.kind:
                case "reasoning":
                    delta.reasoning_content = (delta.reasoning_content or "") + part.text
                case "content":
                    delta.content = (delta.content or "") + part.text
                case "call":
                    calls.append(
                        DeltaCall(part.number, CalledFunction("", part.text), self._form.new_call_id(), "function")
                    )
                case "arguments":
                    if not calls or calls[-1].index != part.number:
                        calls.append(DeltaCall(part.number, CalledFunction("")))
                    calls[-1].function.arguments += part.text
        if calls and self._form.use.legacy:
            delta.function_call = calls[0].function
        elif calls:
            delta.tool_calls = calls
        return delta

    def _parts(self, text: str, final: bool) -> list[Part]:
        parts = self._parser.feed(text)
        if final:
            parts += self._parser.finish()
        self.has_calls |= any(part.kind == "call" for part in parts)
        if not self._form.include:
            return [part for part in parts if part.kind != "reasoning"]
        return self._in_one(parts, final) if self._form.in_one else parts

    def _in_one(self, parts: list[Part], final: bool) -> list[Part]:
        """Holds reasoning back until something else comes."""
        self._held_reasoning += [part.text for part in parts if part.kind == "reasoning"]
        others = [part for part in parts if part.kind != "reasoning"]
        if self._held_reasoning and (others or final):
            others.insert(0, Part("reasoning", "".join(self._held_reasoning)))
            self._held_reasoning.clear()
        return others


def finish_reason(reason: str, writer: MessageWriter, legacy: bool) -> str:
    """Returns OpenAI's reason: a sample that ended by itself with calls has ended to call."""
    if reason == "stop" and writer.has_calls:
        return "function_call" if legacy else "tool_calls"
    return reason
