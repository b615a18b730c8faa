"""Chat messages to prompt ids through the model's own Jinja template.

jinja2 is used directly, in its sandbox, with the extensions Hugging Face templates rely on; so a first chat costs no
import of transformers (tests compare the two). The template writes the begin token, so the tokenizer adds none.

Special tokens that a client writes *inside* a message are plain text: they are hidden behind placeholders while the
template runs and encoded as ordinary characters. Only the template's own marks become special tokens.
"""

import json
import logging
import re
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2

from crosspool.errors import CheckpointError
from crosspool.server.answer_formats import answer_format
from crosspool.server.messages import Message
from crosspool.server.template_environment import template_environment
from crosspool.server.template_files import named_templates, read_template
from crosspool.server.tokenizer import TextTokenizer, special_token, tokenizer_config

logger = logging.getLogger(__name__)

REASONING_MARKS = ("<think>", "</think>")
"""Templates split these off assistant turns themselves, so there they stay what they are."""


class HiddenMarks:
    """Swaps special tokens in a client's text for placeholders that no client can guess, and back."""

    def __init__(self, special_tokens: dict[str, int]) -> None:
        ordered = sorted(special_tokens, key=len, reverse=True)
        self._marks = ordered
        self._pattern = re.compile("|".join(map(re.escape, ordered))) if ordered else None
        self._nonce = secrets.token_hex(8)
        self._index = {mark: index for index, mark in enumerate(ordered)}
        self.used = False

    def hide_message(self, message: Message) -> Message:
        keep = REASONING_MARKS if message["role"] == "assistant" else ()
        return {key: item if key == "role" else self.hide(item, keep) for key, item in message.items()}

    def hide(self, value: Any, keep: tuple[str, ...] = ()) -> Any:
        """`value` with the marks in its strings (and those of dicts and lists in it) hidden, but for `keep`."""
        if isinstance(value, str) and self._pattern is not None:
            return self._pattern.sub(lambda match: self._placeholder(match[0], keep), value)
        if isinstance(value, dict):
            return {self.hide(key, keep): self.hide(item, keep) for key, item in value.items()}
        if isinstance(value, list):
            return [self.hide(item, keep) for item in value]
        return value

    def split_at_marks(self, text: str) -> list[str]:
        """`text` cut into the marks that the template wrote and what lies between them."""
        assert self._pattern is not None, "marks were hidden, so there is a pattern"
        return [piece for piece in re.split(f"({self._pattern.pattern})", text) if piece]

    def reveal(self, text: str) -> str:
        return re.sub(f"\ue000{self._nonce}:(\\d+)\ue001", lambda match: self._marks[int(match[1])], text)

    def _placeholder(self, mark: str, keep: tuple[str, ...]) -> str:
        if mark in keep:
            return mark
        self.used = True
        return f"\ue000{self._nonce}:{self._index[mark]}\ue001"


SPECIAL_TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class TemplateError(ValueError):
    """The template refuses the conversation, or drops a part of it; the message is meant for the client."""


class ChatTemplate:
    """One model's chat template and the tokenizer that its text is for. format: how its answers are written.

    with_tools: another one, of models that have it, for conversations with tools.
    """

    def __init__(
        self, source: str, tokenizer: TextTokenizer, variables: dict[str, str], with_tools: str | None = None
    ) -> None:
        self._template = _compiled(source)
        self._with_tools = self._template if with_tools is None else _compiled(with_tools)
        sources = source + (with_tools or "")
        self._knows_developer = "developer" in sources
        self.format = answer_format(sources)
        self._tokenizer = tokenizer
        self._variables = variables

    def prompt_ids(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool,
        kwargs: dict[str, Any],
        limit: int | None = None,
    ) -> list[int]:
        """Token ids of the rendered conversation, with exactly the special tokens that the template writes.

        Raises TemplateError with the template's own words where it refuses, or where it would drop a message's text;
        TooLongError where a part of it has far more tokens than `limit`.
        """
        hidden = HiddenMarks(self._tokenizer.special_tokens)
        shown = [hidden.hide_message(self._named(message)) for message in messages]
        try:
            text = self.render(shown, add_generation_prompt=add_generation_prompt, kwargs=hidden.hide(kwargs))
            _require_whole(text, shown)
        except TemplateError as error:
            raise TemplateError(hidden.reveal(str(error))) from None
        if not hidden.used:
            return self._tokenizer.encode(text, add_special_tokens=False, limit=limit)
        ids: list[int] = []
        for piece in hidden.split_at_marks(text):
            mark = self._tokenizer.special_tokens.get(piece)
            ids += [mark] if mark is not None else self._tokenizer.encode_plain(hidden.reveal(piece), limit=limit)
        return ids

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool, kwargs: dict[str, Any]) -> str:
        values = {
            **self._variables,
            "tools": None,
            "documents": None,
            **kwargs,
            "messages": list(messages),
            "add_generation_prompt": add_generation_prompt,
        }
        template = self._with_tools if values["tools"] else self._template
        try:
            return template.render(values)
        except jinja2.TemplateError as error:
            raise TemplateError(f"the model's chat template refuses this conversation: {error.message}") from None
        except (TypeError, ValueError, KeyError, AttributeError, IndexError, ArithmeticError, RecursionError) as error:
            raise TemplateError(
                f"the model's chat template cannot render this conversation ({type(error).__name__}: {error})"
            ) from None

    def _named(self, message: Message) -> Message:
        if message["role"] == "developer" and not self._knows_developer:
            return {**message, "role": "system"}
        return message


def load_chat_template(directory: Path, tokenizer: TextTokenizer, override: Path | None = None) -> ChatTemplate | None:
    """The template of `override`, or of the model directory; None where the model has none."""
    config = tokenizer_config(directory)
    templates = {"default": read_template(override)} if override is not None else named_templates(directory, config)
    source = templates.get("default")
    if source is None:
        if templates:
            names = ", ".join(sorted(templates))
            logger.warning("%s: its chat templates are %s, and none is the default; none is used", directory, names)
        return None
    tokens = {name: special_token(config, name) for name in SPECIAL_TOKEN_NAMES}
    variables = {name: token for name, token in tokens.items() if token is not None}
    return ChatTemplate(source, tokenizer, variables, templates.get("tool_use"))


def _compiled(source: str) -> jinja2.Template:
    try:
        return template_environment().from_string(source)
    except jinja2.TemplateSyntaxError as error:
        raise CheckpointError(f"the chat template does not compile: line {error.lineno}: {error.message}") from None


def _require_whole(text: str, messages: Sequence[Message]) -> None:
    """Raise TemplateError where a message's text is not in the prompt: an answer to half a conversation is worse.

    Templates may trim and re-indent, write text as JSON, and leave the reasoning of earlier turns out.
    """
    flat = _flat(text)
    position = 0  # turns come in order nearly always, so that each is looked for once
    for index, message in enumerate(messages):
        content = message.get("content") or ""
        if message["role"] == "assistant":
            content = content.rsplit("</think>", 1)[-1]
        wanted = _flat(content)
        found = flat.find(wanted, position)
        if found >= 0:
            position = found + len(wanted)
        elif wanted not in flat and _flat(json.dumps(content, ensure_ascii=False)[1:-1]) not in flat:
            raise TemplateError(
                f"the model's chat template leaves out messages[{index}] (role {message['role']}); "
                "merge it with a neighbour or drop it"
            )
        for call in message.get("tool_calls") or ():
            if call["function"]["name"] not in text:
                raise TemplateError(
                    f"the model's chat template leaves out the tool calls of messages[{index}]; it knows no tools"
                )


def _flat(text: str) -> str:
    return " ".join(text.split())
