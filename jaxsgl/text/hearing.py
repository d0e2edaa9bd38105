"""How models that hear are asked for a transcript or a translation. Knows no protocol; endpoints take the prompts."""

from __future__ import annotations

from jaxsgl.errors import InvalidRequest
from jaxsgl.preprocess.sources import SoundSource
from jaxsgl.text.prompts import ChatPrompt, Prompt, TextPrompt
from jaxsgl.text.tokenizer import Tokenizer
from jaxsgl.text.voxtral import TRANSCRIBE, has_voxtrals_words

ENGLISH = "en"
# Of languages by ISO 639-1's letters, those that the models know best; others are asked for by their letters.
_LANGUAGES = {
    "ar": "Arabic", "de": "German", "en": "English", "es": "Spanish", "fr": "French", "hi": "Hindi", "it": "Italian",
    "ja": "Japanese", "ko": "Korean", "nl": "Dutch", "pt": "Portuguese", "ru": "Russian", "zh": "Chinese",
}  # fmt: skip
_LETTERS = {name.lower(): letters for letters, name in _LANGUAGES.items()}
# ISO 639-1, and Whisper's two of three letters: Cantonese and Hawaiian.
_SPELLED = (
    "aa ab ae af ak am an ar as av ay az ba be bg bh bi bm bn bo br bs ca ce ch co cr cs cu cv cy da de dv dz ee el en "
    "eo es et eu fa ff fi fj fo fr fy ga gd gl gn gu gv ha he hi ho hr ht hu hy hz ia id ie ig ii ik io is it iu ja jv "
    "jw ka kg ki kj kk kl km kn ko kr ks ku kv kw ky la lb lg li ln lo lt lu lv mg mh mi mk ml mn mr ms mt my na nb nd "
    "ne ng nl nn no nr nv ny oc oj om or os pa pi pl ps pt qu rm rn ro ru rw sa sc sd se sg si sk sl sm sn so sq sr ss "
    "st su sv sw ta te tg th ti tk tl tn to tr ts tt tw ty ug uk ur uz ve vi vo wa wo xh yi yo za zh zu yue haw"
)
_ALL_LETTERS = frozenset(_SPELLED.split())


def language_of(told: str) -> str:
    """Returns the letters of a language that a client tells by them, with a region or not, or by its English name.

    Raises `InvalidRequest` for what is none; "" stays.
    """
    letters = _LETTERS.get(told.lower(), told.lower().partition("-")[0])
    if told and letters not in _ALL_LETTERS:
        raise InvalidRequest(
            f"language is {told!r:.100}, but must be letters of ISO 639-1, as en, or one of {', '.join(_LETTERS)}"
        )
    return letters


def transcript_prompt(tokenizer: Tokenizer, sound: SoundSource, language: str, hint: str) -> Prompt:
    """Returns what asks for what is said in `sound`, in the model's own words for that, or in its chat template.

    Args:
      tokenizer: of the model.
      sound: what is heard.
      language: letters of ISO 639-1; "": the model finds out.
      hint: the client's `prompt`, which is asked in place of the usual question; "": the client sent none.

    Raises:
      InvalidRequest: a hint is given to a model that has no place for it.
    """
    if has_voxtrals_words(frozenset(tokenizer.special_names)):
        if hint:
            raise InvalidRequest("prompt is given, but the model transcribes without one: leave it out, or chat")
        start = "".join(tokenizer.token_bytes(token_id).decode() for token_id in tokenizer.ids_before_texts())
        told = f"lang:{language}" if language else ""
        return TextPrompt(f"{start}[INST][BEGIN_AUDIO][AUDIO][/INST]{told}{TRANSCRIBE}", False, (sound,))
    return _question(sound, language, hint or "Write down what is said in the audio, word for word and nothing else.")


def translation_prompt(sound: SoundSource, language: str, hint: str) -> Prompt:
    """Returns what asks for that in English."""
    return _question(
        sound, language, hint or "Translate what is said in the audio into English, and write nothing else."
    )


def _question(sound: SoundSource, language: str, text: str) -> Prompt:
    told = f"The audio is in {_LANGUAGES.get(language, language)}. " if language else ""
    parts = [{"type": "audio", "audio": ""}, {"type": "text", "text": told + text}]
    return ChatPrompt([{"role": "user", "content": parts}], media=(sound,))
