"""Conversations as prompts, through a tokenizer's chat template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from reprlib import repr as shown
from typing import Any

from transformers import PreTrainedTokenizerBase

from specpaged.checks import check_bool
from specpaged.prompts import is_unicode

Message = Mapping[str, Any]
Conversation = Sequence[Message]

_MESSAGES_FORM = "a conversation, [{'role': ..., 'content': ...}, ...], or a list of conversations"
_NOT_FOR_TEMPLATES = ("conversation", "chat_template", "tools", "add_generation_prompt", "continue_final_message")
_OF_TOKENIZERS = ("tokenize", "padding", "truncation", "max_length", "return_tensors", "return_dict")


@dataclass(frozen=True)
class ChatRenderer:
    """Renders conversations with a template, that of the tokenizer or another one; vLLM's names and meanings.

    Raises:
        ValueError: for an argument that cannot be, before anything is rendered; it says what is allowed.
    """

    tokenizer: PreTrainedTokenizerBase | None
    model: str  # whose tokenizer it is, for messages
    chat_template: str | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    tools: Sequence[Any] | None = None
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.tokenizer is None:
            raise ValueError(
                f"model={self.model!r} has no tokenizer, and chat() needs one; "
                "allowed: a checkpoint with a tokenizer, or generate() with {'prompt_token_ids': [...]}"
            )
        if self.chat_template is not None and not isinstance(self.chat_template, str):
            raise ValueError(f"chat_template={shown(self.chat_template)} must be None or the text of a Jinja template")
        if self.chat_template is None and not self.tokenizer.chat_template:
            raise ValueError(
                f"model={self.model!r} has a {type(self.tokenizer).__name__} without a chat template; "
                "allowed: chat_template=... (the text of a Jinja template), or generate()"
            )
        check_bool("add_generation_prompt", self.add_generation_prompt)
        check_bool("continue_final_message", self.continue_final_message)
        if self.add_generation_prompt and self.continue_final_message:
            raise ValueError(
                "continue_final_message=True goes on with the last message, and add_generation_prompt=True begins "
                "another one; allowed: continue_final_message=True with add_generation_prompt=False"
            )
        if isinstance(self.tools, str | bytes | Mapping) or not isinstance(self.tools, Sequence | None):
            raise ValueError(f"tools={shown(self.tools)} must be None or a list of JSON schemas")
        if not isinstance(self.chat_template_kwargs, Mapping):
            raise ValueError(f"chat_template_kwargs={shown(self.chat_template_kwargs)} must be a mapping")
        for name in self.chat_template_kwargs:
            if name in _NOT_FOR_TEMPLATES or name in _OF_TOKENIZERS:
                raise ValueError(
                    f"chat_template_kwargs has {name!r}; allowed: variables of the template "
                    "(what chat() itself takes is an argument of its own)"
                )

    def render(self, conversation: Conversation) -> tuple[str, list[int]]:
        """A conversation as text and as token ids. ValueError if it is none, or if the template refuses it.

        Special tokens are those that the template writes: the tokenizer adds none to them.
        """
        messages = [_checked(message, idx) for idx, message in enumerate(_as_list(conversation))]
        try:
            text = self.tokenizer.apply_chat_template(
                messages,
                tokenize=False,
                chat_template=self.chat_template,
                add_generation_prompt=self.add_generation_prompt,
                continue_final_message=self.continue_final_message,
                tools=None if self.tools is None else list(self.tools),
                **self.chat_template_kwargs,
            )
        except Exception as error:  # a template is a program that came with the checkpoint: it may raise anything
            raise ValueError(
                f"messages cannot be rendered with the chat template of model={self.model!r}: "
                f"{type(error).__name__}: {error}"
            ) from error
        if not is_unicode(text):
            raise ValueError(
                f"messages={shown(conversation)} hold a lone surrogate; allowed: text that UTF-8 can write"
            )
        return text, self.tokenizer.encode(text, add_special_tokens=False)


def conversations(messages: Any) -> list[Any]:
    """One conversation or several as a list of them. ValueError if `messages` is neither."""
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes):
        raise ValueError(f"messages={shown(messages)} must be {_MESSAGES_FORM}")
    if messages and all(isinstance(message, Mapping) for message in messages):
        return [messages]
    return list(messages)


def _as_list(conversation: Any) -> list[Any]:
    if not isinstance(conversation, Sequence) or isinstance(conversation, str | bytes) or not conversation:
        raise ValueError(f"messages has the conversation {shown(conversation)}; allowed: {_MESSAGES_FORM}")
    return list(conversation)


def _checked(message: Any, idx: int) -> dict[str, Any]:
    """The message, its text in one piece: parts of a content that comes as a list are lines of it."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise ValueError(f"messages[{idx}]={shown(message)} must be a mapping with a 'role' and a 'content'")
    content = message.get("content")
    if content is None and message.get("tool_calls"):
        return dict(message)
    if isinstance(content, Sequence) and not isinstance(content, str | bytes):
        for part in content:
            if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
                raise ValueError(
                    f"messages[{idx}]['content'] has the part {shown(part)}; allowed: {{'type': 'text', 'text': ...}}"
                )
        content = "\n".join(part["text"] for part in content)
    if not isinstance(content, str):
        raise ValueError(f"messages[{idx}]['content']={shown(content)} must be text, or a list of parts of text")
    return {**message, "content": content}
