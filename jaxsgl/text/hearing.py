"""How models that hear are asked for a transcript or a translation. Knows no protocol; endpoints take the prompts."""

from __future__ import annotations

from jaxsgl.errors import InvalidRequest
from jaxsgl.preprocess.sources import SoundSource
from jaxsgl.text.prompts import ChatPrompt, Prompt, TextPrompt
from jaxsgl.text.tokenizer import Tokenizer
from jaxsgl.text.voxtral import TRANSCRIBE, has_voxtrals_words

_ENGLISH = "English"
# Of languages by ISO 639-1's letters, those that the models know best; others are asked for by their letters.
_LANGUAGES = {
    "ar": "Arabic", "de": "German", "en": _ENGLISH, "es": "Spanish", "fr": "French", "hi": "Hindi", "it": "Italian",
    "ja": "Japanese", "ko": "Korean", "nl": "Dutch", "pt": "Portuguese", "ru": "Russian", "zh": "Chinese",
}  # fmt: skip


def transcript_prompt(tokenizer: Tokenizer, sound: SoundSource, language: str, hint: str) -> Prompt:
    """Returns what asks for what is said in `sound`, in the model's own words for that, or in its chat template.

    Args:
      tokenizer: of the model.
      sound: what is heard.
      language: letters of ISO 639-1; "": the model finds out.
      hint: takes the place of the question; "": there is none.

    Raises:
      InvalidRequest: a hint is given to a model that has no place for it.
    """
    if has_voxtrals_words(frozenset(tokenizer.special_names)):
        if hint:
            raise InvalidRequest("prompt is given, but the model transcribes without one: leave it out, or chat")
        start = "".join(tokenizer.token_bytes(token_id).decode() for token_id in tokenizer.ids_before_texts())
        told = f"lang:{language}" if language else ""
        return TextPrompt(f"{start}[INST][BEGIN_AUDIO][AUDIO][/INST]{told}{TRANSCRIBE}", False, (sound,))
    told = f", which is in {_LANGUAGES.get(language, language)}" if language else ""
    return _question(sound, hint or f"Write down what is said in the audio{told}, word for word and nothing else.")


def translation_prompt(sound: SoundSource, hint: str) -> Prompt:
    """Returns what asks for that in English."""
    return _question(sound, hint or f"Translate what is said in the audio into {_ENGLISH}, and write nothing else.")


def _question(sound: SoundSource, text: str) -> Prompt:
    parts = [{"type": "audio", "audio": ""}, {"type": "text", "text": text}]
    return ChatPrompt([{"role": "user", "content": parts}], media=(sound,))
