"""The routes of OpenAI's and vLLM's interfaces: what each asks for, and how it is answered.

    GET  /v1/models               the model, with max_model_len
    POST /v1/completions          behind texts or ids
    POST /v1/chat/completions     behind messages, as the chat template writes them
    POST /inference/v1/generate   behind ids, ids alone

The second and the third answer as a stream if asked to: in one piece, when all is drawn.

Who draws is not known here: `draw` may ask an engine at once, or end a turn of a sample that is
being trained on.

Source: OpenAI's API reference; the answers of vLLM 0.32, field by field.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from jaxgrpo.core.errors import InputError
from jaxgrpo.data import chat as chats
from jaxgrpo.data.chat import Chat, Message
from jaxgrpo.environments.calls import Parser, Reading, cast
from jaxgrpo.environments.history import write_in_some_form
from jaxgrpo.environments.serving.fields import (
    SAMPLING,
    Completion,
    Fields,
    Limits,
    Wish,
    read_prompts,
    read_wish,
)
from jaxgrpo.environments.serving.server import Document, Query, Refusal

IDS = ("return_token_ids", "return_tokens_as_token_ids")
COMPLETION = ("prompt", "add_special_tokens", *IDS)
OPENS = ("add_generation_prompt", "continue_final_message")
FLAGS = (*OPENS, *IDS)
CHAT = ("messages", "max_completion_tokens", "tools", "tool_choice", "chat_template_kwargs", *FLAGS)
GENERATE = ("token_ids", "sampling_params")
STREAMED = ("/v1/completions", "/v1/chat/completions")  # what answers as a stream, too
PARTS = "jaxgrpopart", "jaxgrpofurther"  # texts of a message that a template writes on trial
DEFAULT_TOKENS = 16  # of a completion behind a text or ids, as there


class Prompted(NamedTuple):
    """What a query asks for, and the conversation that it stands for."""

    wish: Wish
    messages: Sequence[Message] = ()  # of a chat
    tools: tuple[dict[str, Any], ...] = ()
    text: str = ""  # where the prompt is one
    skips: bool = True  # special tokens are left out of the answer's text
    before: str = ""  # the prompt of a chat, as its template writes it
    options: Mapping[str, Any] = {}  # variables of the template with which it writes that


Draw = Callable[[Prompted], list[list[Completion]]]
"""The completions of each prompt. Raises: Refusal, InputError."""


class Dialect:
    """Answers the routes for a model.

    Args:
      name: of the model, that queries give.
      chat: how messages are written out, without tools.
      parse: gives the parser of calls, or raises InputError where the template shows none.
      stop_tokens: of the model.
    """

    def __init__(
        self,
        name: str,
        chat: Chat,
        limits: Limits,
        parse: Callable[[], Parser],
        stop_tokens: Sequence[int],
    ):
        self.name, self.chat, self.limits = name, chat, limits
        self._parse, self._stop_tokens = functools.cache(parse), frozenset(stop_tokens)
        self._created = int(time.time())
        self._numbers = itertools.count()
        self._prefix = secrets.token_hex(6)

    def answer(self, path: str, query: Query, draw: Draw) -> Document:
        """Answers a query; `path` is its path from the route on. Raises: Refusal, InputError."""
        routes: dict[str, tuple[str, Callable[[Mapping[str, Any], Draw], dict[str, Any]]]] = {
            "/v1/models": ("GET", lambda document, draw: self._models()),
            "/v1/completions": ("POST", self._complete),
            "/v1/chat/completions": ("POST", self._chat),
            "/inference/v1/generate": ("POST", self._generate),
        }
        if path not in routes:
            raise Refusal(404, f"{path}: there is no such path; there are {', '.join(routes)}")
        method, route = routes[path]
        if query.method != method:
            raise Refusal(405, f"{path}: {query.method} is not served; use {method}")
        name = query.document.get("model", self.name)
        if name is not None and name != self.name:
            raise Refusal(404, f"model = {name!r}: there is only {self.name!r}", "model")
        document = {key: value for key, value in query.document.items() if key != "model"}
        if path not in STREAMED or document.get("stream") is not True:
            return route(document, draw)
        del document["stream"]
        return _events(route(document, draw), document.get("stream_options"))

    def _models(self) -> dict[str, Any]:
        model = {
            "id": self.name,
            "object": "model",
            "created": self._created,
            "owned_by": "jaxgrpo",
            "root": self.name,
            "parent": None,
            "max_model_len": self.limits.longest,
        }
        return {"object": "list", "data": [model]}

    def _complete(self, document: Mapping[str, Any], draw: Draw) -> dict[str, Any]:
        fields = Fields(document, COMPLETION)
        has_special = fields.flag("add_special_tokens", True)
        prompts = read_prompts(fields, self.limits, lambda text: self._encode(text, has_special))
        wish = read_wish(fields, prompts, self.limits, DEFAULT_TOKENS)
        has_logp, with_ids = fields.asks_logp(), fields.flag(IDS[0])
        shows_ids, skips = fields.flag(IDS[1]), fields.flag("skip_special_tokens", True)
        texts = [document["prompt"]] if isinstance(document["prompt"], str) else document["prompt"]
        text = texts[0] if len(texts) == 1 and isinstance(texts[0], str) else ""
        drawn = draw(Prompted(wish, text=text, skips=skips))
        choices = []
        for prompt, completions in zip(prompts, drawn, strict=True):
            for completion in completions:
                ids = {"token_ids": completion.tokens, "prompt_token_ids": prompt}
                choices.append(
                    {
                        "index": len(choices),
                        "text": self.text(completion, skips),
                        "logprobs": self._table(completion, shows_ids) if has_logp else None,
                        **_ending(completion),
                        "prompt_logprobs": None,
                        **(ids if with_ids else dict.fromkeys(ids)),
                    }
                )
        return self._document("cmpl", "text_completion", choices, wish, drawn)

    def _chat(self, document: Mapping[str, Any], draw: Draw) -> dict[str, Any]:
        fields = Fields(_with_max_tokens(document), CHAT)
        messages = read_conversation(document.get("messages"), self._between_parts)
        chat = self._chat_with(fields)
        text = self._render(chat, messages, _is_opened(fields, messages))
        prompt = self._encode(text, chat.template is None)
        wish = read_wish(fields, [prompt], self.limits, None)
        if chat.tools:
            self._parse()  # a template without calls is refused before anything is drawn
        has_logp, with_ids = fields.asks_logp(), fields.flag(IDS[0])
        shows_ids, skips = fields.flag(IDS[1]), fields.flag("skip_special_tokens", True)
        prompted = Prompted(
            wish, messages, chat.tools, skips=skips, before=text, options=chat.options
        )
        drawn = draw(prompted)
        choices = []
        for number, completion in enumerate(drawn[0]):
            content = self._content(completion, shows_ids) if has_logp else None
            message = self.message(completion, prompted)
            ending = _ending(completion)
            if message["tool_calls"] and completion.finish == "stop":
                ending["finish_reason"] = "tool_calls"
            ids = {"token_ids": completion.tokens if with_ids else None}
            choices.append(
                {
                    "index": number,
                    "message": message,
                    "logprobs": None if content is None else {"content": content},
                    **(ending | ids),
                }
            )
        answer = self._document("chatcmpl", "chat.completion", choices, wish, drawn)
        ids = {"prompt_token_ids": prompt if with_ids else None}
        return answer | {"prompt_logprobs": None} | ids

    def _generate(self, document: Mapping[str, Any], draw: Draw) -> dict[str, Any]:
        fields = Fields(document, GENERATE)
        if stray := next((name for name in fields.values if name in SAMPLING), None):
            raise Refusal(400, f"{stray}: write it into sampling_params", stray)
        parameters = fields.values.get("sampling_params", {})
        if not isinstance(parameters, dict):
            fields.refuse("sampling_params", "an object")
        sampling = Fields(parameters, ())
        prompt = fields.tokens(
            "token_ids", fields.values.setdefault("token_ids", []), self.limits.vocab_size
        )
        wish = read_wish(sampling, [prompt], self.limits, None)
        has_logp = sampling.asks_logp(1)  # with 0 and 1 alike, it is the drawn token's
        drawn = draw(Prompted(wish))
        choices = [
            {
                "index": number,
                "token_ids": completion.tokens,
                "logprobs": {"content": _pairs(completion)} if has_logp else None,
                **_ending(completion),
                "routed_experts": None,
                "sampling_mask": None,
                "weight_versions": [
                    {
                        "version": str(completion.version),
                        "start": 0,
                        "end": len(completion.tokens),
                    }
                ],
            }
            for number, completion in enumerate(drawn[0])
        ]
        answer = self._document("generate", "", choices, wish, drawn)
        names = "choices", "usage"
        return {"request_id": answer["id"], "prompt_logprobs": None} | {k: answer[k] for k in names}

    def read(self, text: str, prompted: Prompted) -> Reading:
        """A turn's text; with tools its calls, unless one of them cannot be read."""
        if not prompted.tools:
            return Reading(text, [])
        reading = cast(self._parse()(text, prompted.before), prompted.tools)
        is_read = reading.calls and not any(call.problem for call in reading.calls)
        return reading if is_read else Reading(text, [])

    def message(self, completion: Completion, prompted: Prompted) -> Message:
        """The assistant's message; without calls it is the text as the query wants it. A call has
        the id that the model wrote, if it wrote one."""
        text = self.text(completion, skips=False)
        reading = self.read(text, prompted)
        if not reading.calls and isinstance(completion.stop, str):  # which may close a call
            reading = self.read(text + completion.stop, prompted)
        if not reading.calls:
            reading = Reading(self.text(completion, prompted.skips), [])
        calls = []
        for number, call in enumerate(reading.calls):
            written = json.dumps(call.arguments, ensure_ascii=False)
            function = {"name": call.name, "arguments": written}
            identity = call.id or _call_id(prompted.wish.prompts[0], completion.tokens, number)
            calls.append({"id": identity, "type": "function", "function": function})
        content = reading.content if reading.content or not calls else None
        message = {"role": "assistant", "content": content, "refusal": None, "tool_calls": calls}
        return {**reading.more, **message}

    def _chat_with(self, fields: Fields) -> Chat:
        """The template with the tools and variables of a query."""
        chat, tools = self.chat, fields.values.get("tools", [])
        if not isinstance(tools, list) or not all(map(_tool_name, tools)):
            fields.refuse("tools", '[{"type": "function", "function": {"name": ..., ...}}, ...]')
        choice = fields.values.get("tool_choice", "auto")
        if choice != "auto" and not (choice == "none" and not tools):
            fields.refuse("tool_choice", '"auto"')
        options = fields.values.get("chat_template_kwargs", {})
        if not isinstance(options, dict):
            fields.refuse("chat_template_kwargs", "an object")
        chats.check_options(chat, options, "chat_template_kwargs")
        return chat._replace(tools=tuple(tools), options=chat.options | options)

    def _render(self, chat: Chat, messages: list[Message], is_opened: bool) -> str:
        """Messages as text, with the run's system message where they have none."""
        if chat.template is None:
            raise InputError(
                f"messages: there is no chat template ({chat.name}): use /v1/completions"
            )
        if messages[0]["role"] == "system":
            chat = chat._replace(system=None)

        def write(form: list[Message]) -> str:
            return chats.write(chat, form, "messages", is_opened or None, is_limited=False)

        text = write_in_some_form(write, messages)
        for name in map(_tool_name, chat.tools):
            if name not in text:
                raise InputError(f"tools: {chat.name} does not write them: leave them out")
        return text

    @functools.cached_property
    def _between_parts(self) -> str:
        """What stands between two parts of a message: nothing where the chat template puts parts
        together, else a line break, as in vLLM."""
        content = [{"type": "text", "text": text} for text in PARTS]
        message = {"role": "user", "content": content}
        try:
            text = chats.render(self.chat, [message], "messages", True, is_limited=False)
        except InputError:  # it takes texts alone
            return "\n"
        return "" if "".join(PARTS) in text else "\n"

    def _encode(self, text: str, has_special: bool) -> list[int]:
        return chats.encode(self.chat, text, has_special)

    def text(self, completion: Completion, skips: bool) -> str:
        """The text of a completion, up to the token or text that ended it.

        Args:
          skips: special tokens are left out.
        """
        tokens = completion.tokens
        if isinstance(completion.stop, int) or self._stop_tokens.intersection(tokens[-1:]):
            tokens = tokens[:-1]
        text = self.chat.tokenizer.decode(
            tokens, skip_special_tokens=skips, clean_up_tokenization_spaces=False
        )
        return text.partition(completion.stop)[0] if isinstance(completion.stop, str) else text

    def stop_string(self, tokens: Sequence[int]) -> str | None:
        """Which of `Limits.stop_strings` a turn holds, the first one; None: none."""
        text = self.chat.tokenizer.decode(tokens, clean_up_tokenization_spaces=False)
        strings = [string for string in self.limits.stop_strings if string in text]
        return min(strings, key=text.index, default=None)

    def _token_texts(self, tokens: Sequence[int], shows_ids: bool) -> list[str]:
        if shows_ids:
            return [f"token_id:{token}" for token in tokens]
        return [self.chat.tokenizer.decode([token]) for token in tokens]

    def _table(self, completion: Completion, shows_ids: bool) -> dict[str, Any]:
        """Log-probs as text completions have them."""
        texts = self._token_texts(completion.tokens, shows_ids)
        ends = itertools.accumulate(map(len, texts), initial=0)
        return {
            "text_offset": [*ends][:-1],
            "token_logprobs": completion.logp,
            "tokens": texts,
            "top_logprobs": [
                {text: logp} for text, logp in zip(texts, completion.logp, strict=True)
            ],
        }

    def _content(self, completion: Completion, shows_ids: bool) -> list[dict[str, Any]]:
        """Log-probs as chats have them."""
        texts = self._token_texts(completion.tokens, shows_ids)
        return [
            {"token": text, "logprob": logp, "bytes": [*text.encode()], "top_logprobs": []}
            for text, logp in zip(texts, completion.logp, strict=True)
        ]

    def _document(
        self,
        prefix: str,
        kind: str,
        choices: list[dict[str, Any]],
        wish: Wish,
        drawn: Sequence[Sequence[Completion]],
    ) -> dict[str, Any]:
        read = sum(map(len, wish.prompts))
        written = sum(len(entry.tokens) for completions in drawn for entry in completions)
        return {
            "id": f"{prefix}-{self._prefix}{next(self._numbers)}",
            "object": kind,
            "created": int(time.time()),
            "model": self.name,
            "choices": choices,
            "usage": {
                "prompt_tokens": read,
                "completion_tokens": written,
                "total_tokens": read + written,
            },
        }


def read_conversation(value: Any, between_parts: str = "\n") -> list[Message]:
    """Messages as chat templates read them.

    Parts of a text are put together, and the arguments of calls, JSON in a text, are read.
    Raises: Refusal where they are no messages, or hold something else than text.
    """
    if not isinstance(value, list) or not value:
        raise Refusal(400, "messages: expected a list of messages, at least one", "messages")
    return [_read_message(entry, f"messages[{n}]", between_parts) for n, entry in enumerate(value)]


def _read_message(value: Any, where: str, between_parts: str) -> Message:
    if not isinstance(value, dict) or not isinstance(value.get("role"), str):
        raise Refusal(400, f'{where}: expected {{"role": ..., "content": ...}}', where)
    message = {name: entry for name, entry in value.items() if entry is not None and entry != []}
    content, calls = message.get("content", ""), message.get("tool_calls", [])
    if isinstance(content, list):
        if not all(map(_is_text_part, content)):
            raise Refusal(400, f"{where}.content: only parts of type text are read", where)
        content = between_parts.join(part["text"] for part in content)
    if not isinstance(content, str) or ("content" not in message and not calls):
        raise Refusal(400, f"{where}.content: expected a text, or a list of parts of text", where)
    if not isinstance(calls, list):
        raise Refusal(400, f"{where}.tool_calls: expected a list of calls", where)
    message["content"] = content
    if calls:
        message["tool_calls"] = [_read_call(call, where) for call in calls]
    return message


def _is_text_part(part: Any) -> bool:
    is_text = isinstance(part, dict) and part.get("type") == "text"
    return is_text and isinstance(part.get("text"), str)


def _read_call(value: Any, where: str) -> dict[str, Any]:
    function = value.get("function") if isinstance(value, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise Refusal(400, f"{where}.tool_calls: expected functions with name and arguments", where)
    arguments = function.get("arguments", {})
    try:
        arguments = json.loads(arguments or "{}") if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError) as error:
        raise Refusal(400, f"{where}.tool_calls: the arguments are no JSON: {error}") from None
    return {**value, "function": {**function, "arguments": arguments}}


def _is_opened(fields: Fields, messages: Sequence[Message]) -> bool:
    """Whether the answer is a turn of its own, and does not continue the last message."""
    opens, continues = (fields.flag(name, name == OPENS[0]) for name in OPENS)
    if opens == continues or (continues and messages[-1]["role"] != "assistant"):
        problem = (
            f"{OPENS[1]} = {continues} with {OPENS[0]} = {opens}: set {OPENS[0]} = false to "
            "continue the assistant's last message, or leave both out to begin a new turn"
        )
        raise Refusal(400, problem, OPENS[1])
    return opens


def _with_max_tokens(document: Mapping[str, Any]) -> dict[str, Any]:
    """The newer name of the field stands for the older one."""
    fields = dict(document)
    newer = fields.pop("max_completion_tokens", None)
    if newer is not None:
        if fields.get("max_tokens") not in (None, newer):
            raise Refusal(
                400, "max_completion_tokens and max_tokens differ: give one", "max_tokens"
            )
        fields["max_tokens"] = newer
    return fields


def _tool_name(tool: Any) -> str:
    """Of a schema; empty: it is none."""
    function = tool.get("function") if isinstance(tool, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    return name if isinstance(name, str) and tool.get("type") == "function" else ""


def _call_id(prompt: Sequence[int], drawn: Sequence[int], number: int) -> str:
    """The id of a call that the model gave none: nine letters and digits, as Mistral's templates
    ask for. It follows from the tokens, so that a run that is repeated reads the same id again."""
    turn = json.dumps([prompt, drawn, number]).encode()
    return hashlib.blake2b(turn, digest_size=5).hexdigest()[:9]


def _events(answer: Mapping[str, Any], options: Any) -> list[dict[str, Any]]:
    """An answer as the events of a stream: all of it in one, and the usage if that is asked for."""
    choices, kind = [], answer["object"]
    for choice in answer["choices"]:
        rest = dict(choice)
        if message := rest.pop("message", None):
            kind = "chat.completion.chunk"
            calls = [{"index": n, **call} for n, call in enumerate(message["tool_calls"])]
            rest["delta"] = {**message, "tool_calls": calls or None}
        choices.append(rest)
    first = {**answer, "object": kind, "choices": choices, "usage": None}
    last = {**first, "choices": [], "usage": answer["usage"], "prompt_token_ids": None}
    has_usage = isinstance(options, dict) and options.get("include_usage") is True
    return [first, last] if has_usage else [first]


def _ending(completion: Completion) -> dict[str, Any]:
    return {"finish_reason": completion.finish, "stop_reason": completion.stop}


def _pairs(completion: Completion) -> list[dict[str, Any]]:
    return [
        # The first name is vLLM's, the second that of its versions before and of `renderers`.
        {"token_id": token, "token": f"token_id:{token}", "logprob": logp, "top_logprobs": []}
        for token, logp in zip(completion.tokens, completion.logp, strict=True)
    ]
