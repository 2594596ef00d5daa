"""What a chat template writes between an assistant turn and the next one, learned from the template.

A template renders whole conversations; an episode needs only what follows the tokens that the model drew. It is taken
from renderings of a short conversation, and proved not to depend on the history by random ones.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from random import Random
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from rlsys.agent.message_images import image_urls, with_placeholders
from rlsys.agent.trace import Span
from rlsys.data.chat import Message, Messages, Tokenizer, encode_text, render
from rlsys.telemetry.jsonl import JsonObject
from rlsys.utils.errors import ConfigError, raised_as

if TYPE_CHECKING:
    from rlsys.data.vision_processor import VisionProcessor
    from rlsys.protocol import ImageInputs

Kind = Literal["user", "tool"]
Tools = Sequence[JsonObject]
Form = Callable[[Message], Message]
T = TypeVar("T")

SENTINEL = "\u2603SENTINEL\u2603"
NUM_PROOFS = 200
PROOF_TOOL = {
    "type": "function",
    "function": {
        "name": "lookup",
        "description": "Looks a word up.",
        "parameters": {"type": "object", "properties": {"word": {"type": "string", "description": "The word."}}},
    },
}


def call_id(number: int) -> str:
    """The id of a tool call: nine letters and digits, as the strictest templates ask."""
    return f"call{number % 100_000:05d}"


def tool_call(id: str, name: str, arguments: object) -> JsonObject:
    """A tool call in a message of the assistant; `arguments` are an object or its JSON text."""
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _in_parts(message: Message) -> Message:
    text = message["content"]
    return {**message, "content": [{"type": "text", "text": text}]} if isinstance(text, str) else message


def with_arguments(message: Message, write: Callable[[object], object]) -> dict[str, object]:
    """The message with the arguments of its tool calls written in another way."""
    functions = [(call, call["function"]) for call in message.get("tool_calls") or ()]
    written = [{**call, "function": {**f, "arguments": write(f["arguments"])}} for call, f in functions]
    return {**message, "tool_calls": written} if written else dict(message)


FORMS: tuple[Form, ...] = (dict, _in_parts, lambda message: with_arguments(message, json.dumps))
"""How a message is given to a template: as it is, its content as a list of parts, arguments of calls as JSON text."""


class ChatTemplate:
    """Token ids of the start of a conversation and of what is appended to it, by the tokenizer's own template.

    `kinds` of messages are proved at once (ConfigError naming the kind that the template cannot append), others when
    they are first appended. `template_kwargs` go to the template; `processor` is that of a vision-language model.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        template_kwargs: Mapping[str, Any] | None = None,
        kinds: Sequence[Kind] = (),
        processor: "VisionProcessor | None" = None,
    ) -> None:
        self.tokenizer, self._kwargs = tokenizer, dict(template_kwargs or {})
        self._forms: dict[Kind, Form] = {}
        self.processor = processor
        self._encode_appended = lru_cache(maxsize=4096)(self._encode)
        self._encode_images = lru_cache(maxsize=256)(self._read_images)
        for kind in kinds:
            self.prove(kind)

    def encode(
        self, last: Span | None, messages: Messages, tools: Tools | None = None
    ) -> "tuple[tuple[int, ...], tuple[ImageInputs, ...]]":
        """The tokens between a drawn span and the next draw: the turn's end where it was not drawn, messages, prompt;
        for None those of a whole conversation and the prompt. And the messages' images.

        ConfigError if the template cannot append messages of their kind, ValueError if it rejects these, or if there
        are images for a model of text.
        """
        urls, images = image_urls(messages), ()
        if urls and last and self.processor is not None:
            self.processor.check_limit(len(urls) + sum(len(inputs.shas) for inputs in last.all_images))
        messages = with_placeholders(messages)
        text = self._appended_text(messages, tools) if last else self._start_text(messages, tools)
        if urls:
            ids, images = self._encode_images(text, urls)
        else:
            ids = self._encode_appended(text) if last else self._encode(text, start=True)
        is_ended = last is not None and ids and last.ids[-1:] == ids[:1]  # the end of the turn was drawn
        return (ids[1:] if is_ended else ids), images

    def _read_images(self, text: str, urls: tuple[str, ...]) -> "tuple[tuple[int, ...], tuple[ImageInputs, ...]]":
        if self.processor is None:
            raise ValueError("the messages have images, but the model takes text only")
        text, images = self.processor.expand(text, self.processor.load(urls))
        return self._encode(text), images

    def has_drawn_placeholders(self, span: Span) -> bool:
        """Whether there are more placeholders up to a span than its images have; later images would be put there."""
        from rlsys.models.vision import num_features, placeholder_ids

        assert self.processor is not None, "there are images"
        config = self.processor.config
        num_wanted = sum(sum(num_features(config, inputs.tensors)) for inputs in span.all_images)
        return sum(map(span.context.count, placeholder_ids(config))) != num_wanted

    def _appended_text(self, messages: Messages, tools: Tools | None) -> str:
        kind: Kind = "tool" if any(m["role"] in ("tool", "ipython") for m in messages) else "user"
        self.prove(kind)
        return self._suffix(self._forms[kind], _HISTORY, kind, messages, tools)

    def _start_text(self, messages: Messages, tools: Tools | None) -> str:
        """The text of a conversation in the first form of which the template takes the contents."""

        def text(form: Form) -> str:
            self._behind_sentinel(map(form, [{"role": "user", "content": SENTINEL}]), None)
            return self._render(map(form, messages), tools, prompt=True)

        return _first(text)[1]

    def prove(self, kind: Kind) -> None:
        """Learn to append messages of this kind. ConfigError if what is written depends on the history."""
        if kind in self._forms:
            return
        why = f"the tokenizer's chat template cannot append {kind} messages to a conversation"
        fix = "set actor_rollout_ref.model.custom_chat_template to one that can, or use a workflow without them"
        with raised_as(ConfigError, f"{why}; {fix}", ValueError):
            self._forms[kind], _ = _first(lambda form: self._check(form, kind))

    def _check(self, form: Form, kind: Kind) -> None:
        for seed in range(NUM_PROOFS):
            random = Random(seed)
            history, answer = self._accepted(form, _random_history(random)), _word(random)
            new = [{"role": "user", "content": _word(random)}]
            if kind == "tool":
                results = [(call_id(n), _word(random)) for n in range(random.randint(1, 3))]
                new = [{"role": "tool", "name": "lookup", "tool_call_id": id, "content": word} for id, word in results]
            tools = [PROOF_TOOL] if kind == "tool" or random.random() < 0.5 else None
            learned = self._suffix(form, _HISTORY, kind, new, tools)
            if self._suffix(form, history, kind, new, tools) != learned:
                raise ValueError("what it writes after an assistant turn depends on the messages before it")
            if not all(message["content"] in learned for message in new):
                raise ValueError("it leaves out their content")
            if self._encode(answer + learned) != self._encode(answer) + self._encode(learned):
                raise ValueError("the text after an assistant turn does not begin with a token of its own")

    def _accepted(self, form: Form, history: Messages) -> Messages:
        """The history, without its system message if the template has none."""
        try:
            self._render(map(form, history), None, prompt=True)
        except ValueError:
            return [message for message in history if message["role"] != "system"]
        return history

    def _suffix(self, form: Form, history: Messages, kind: Kind, new: Messages, tools: Tools | None) -> str:
        """What the template writes between an assistant turn's content after `history` and the next turn."""
        last: dict[str, Any] = {"role": "assistant", "content": SENTINEL}
        if kind == "user":
            return self._behind_sentinel(map(form, [*history, last, *new]), tools)
        results = [m for m in new if m["role"] in ("tool", "ipython")]
        names = [(m.get("tool_call_id") or call_id(n), m.get("name") or "lookup") for n, m in enumerate(results)]
        last["tool_calls"] = [tool_call(*name, {"word": "w"}) for name in names]
        for content in (SENTINEL, ""):
            called = [*history, {**last, "content": content}]
            try:
                before = self._render(map(form, called), tools, prompt=False)
                whole = self._render(map(form, [*called, *new]), tools, prompt=True)
                close = self._close(before, form, history, tools)
            except ValueError:
                continue
            if close and whole.startswith(before):
                return close + whole[len(before) :]
        del last["tool_calls"]
        return self._behind_sentinel(map(form, [*history, last, *new]), tools)

    def _close(self, text: str, form: Form, history: Messages, tools: Tools | None) -> str:
        """What ends an assistant turn with tool calls: as other turns end, else from the last special token on."""
        last = {"role": "assistant", "content": SENTINEL}
        close = self._behind_sentinel(map(form, [*history, last]), tools, prompt=False)
        if text.endswith(close):
            return close
        at = max((text.rfind(token) for token in self.tokenizer.all_special_tokens), default=-1)
        return text[at:] if at >= 0 else ""

    def _behind_sentinel(self, messages: Iterable[Message], tools: Tools | None, *, prompt: bool = True) -> str:
        text = self._render(messages, tools, prompt=prompt)
        at = text.rfind(SENTINEL)
        if at < 0:
            raise ValueError("it leaves out contents")
        return text[at + len(SENTINEL) :]

    def _render(self, messages: Iterable[Message], tools: Tools | None, *, prompt: bool) -> str:
        kwargs = {**self._kwargs, "tools": list(tools)} if tools else self._kwargs
        return render(self.tokenizer, list(messages), add_generation_prompt=prompt, template_kwargs=kwargs)

    def _encode(self, text: str, *, start: bool = False) -> tuple[int, ...]:
        return tuple(encode_text(self.tokenizer, text, special_tokens=start and not self.tokenizer.chat_template))


_HISTORY = ({"role": "user", "content": "hello"},)


def _first(attempt: Callable[[Form], T]) -> tuple[Form, T]:
    """The first form with which the attempt succeeds, and its result; the first error if there is none."""
    causes = []
    for form in FORMS:
        try:
            return form, attempt(form)
        except ValueError as error:
            causes.append(error)
    raise causes[0]


def _word(random: Random) -> str:
    return "".join(random.choices("abcdefghijklmnopqrstuvwxyz", k=6))


def _random_history(random: Random) -> Messages:
    """A conversation of 0 to 2 answered turns that ends with a question, sometimes with thinking."""
    messages = [{"role": "system", "content": _word(random)}] if random.random() < 0.3 else []
    messages.append({"role": "user", "content": _word(random)})
    for _ in range(random.randrange(3)):
        answer = {"role": "assistant", "content": _word(random)}
        if random.random() < 0.3:
            answer["reasoning_content"] = _word(random)
        messages += [answer, {"role": "user", "content": _word(random)}]
    return messages
