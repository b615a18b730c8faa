"""`crosspool generate`: prompts of a file through several models at once, from two pools, without HTTP.

Answers run all at once and are shown in the order of the prompts, each streaming as soon as those before it have ended.
"""

import asyncio
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from crosspool.commands.loading import Notices, shown_while_loading, teller
from crosspool.commands.serve import deployment
from crosspool.core import TokenConstraint
from crosspool.deployment.launch import load_models, start_engine
from crosspool.deployment.prepared_model import catalogue, prepare_models
from crosspool.engine.async_engine import AsyncEngine
from crosspool.engine.request import GenerationRequest
from crosspool.errors import CrossPoolError, QueueFullError, unreadable_because
from crosspool.server.catalogue import Catalogue, ModelFrontend
from crosspool.server.chat_plan import chat_plan
from crosspool.server.errors import APIError, from_validation
from crosspool.server.prompts import completion_prompts
from crosspool.server.protocol import ChatBody, CompletionBody
from crosspool.server.refusals import refuse_unsupported
from crosspool.server.sampling import generation_request
from crosspool.server.structured import asked_grammar, compiled

RETRY_S = 0.05


@dataclass(slots=True)
class Answer:
    """One prompt on its way: its pieces so far, and what ended it."""

    model: str
    prompt: str
    request: GenerationRequest
    pieces: list[str] = field(default_factory=list)
    finish_reason: str | None = None
    error: str | None = None
    usage: dict[str, int] = field(default_factory=dict)
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def has_ended(self) -> bool:
        return self.finish_reason is not None or self.error is not None

    def to_json(self) -> dict[str, Any]:
        found = {"model": self.model, "prompt": self.prompt, "text": "".join(self.pieces)}
        return {**found, "finish_reason": self.finish_reason, "error": self.error, "usage": self.usage}


def run(
    directories: Sequence[str], prompts: Path, fields: Mapping[str, Any], flags: Mapping[str, Any], *, as_json: bool
) -> None:
    """Raises CrossPoolError for a bad line, which it names, and at the end if an answer failed."""
    lines = read_prompts(prompts)
    asyncio.run(_generate(directories, lines, fields, flags, as_json))


def read_prompts(path: Path) -> list[dict[str, Any]]:
    """The requests in a file: JSON objects with `model` and `prompt` or `messages`, or `model<TAB>prompt`."""
    try:
        text = sys.stdin.read() if str(path) == "-" else path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise CrossPoolError(f"cannot read the prompts in {path}: {unreadable_because(error)}") from None
    # NOTE: splitlines() would also cut at U+2028, form feeds and the like, which may stand in a prompt.
    found = [_parse(line, f"{path}:{number}") for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    if not found:
        raise CrossPoolError(f"{path} holds no prompts; write JSON lines or lines of model<TAB>prompt")
    return found


def _parse(line: str, where: str) -> dict[str, Any]:
    if line.lstrip().startswith("{"):
        try:
            loaded = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise CrossPoolError(f"{where}: not valid JSON: {error}") from None
        if "prompt" in loaded or "messages" in loaded:
            return {"where": where, "body": loaded}
        raise CrossPoolError(f"{where}: has neither prompt nor messages")
    model, tab, prompt = line.partition("\t")
    return {"where": where, "body": {"model": model.strip(), "prompt": prompt} if tab else {"prompt": line}}


async def _generate(
    directories: Sequence[str],
    lines: Sequence[dict[str, Any]],
    fields: Mapping[str, Any],
    flags: Mapping[str, Any],
    as_json: bool,
) -> None:
    config = deployment(directories, (), None, flags)
    console = Notices()
    models = prepare_models(config)
    engine = start_engine(config, models)
    try:
        with shown_while_loading(engine, console, teller(console)):
            await load_models(engine, models)
        served = catalogue(models)
        answers = [await _answer(engine, served, line, fields, index) for index, line in enumerate(lines)]
        async with asyncio.TaskGroup() as group:
            for answer in answers:
                group.create_task(_run(engine, answer))
            group.create_task(_print_json(answers) if as_json else _print_streams(answers))
    finally:
        await engine.close()
    failed = [answer for answer in answers if answer.error is not None]
    if failed:
        raise CrossPoolError(f"{len(failed)} of {len(answers)} answers failed; the first: {failed[0].error}")


async def _answer(
    engine: AsyncEngine, served: Catalogue, line: Mapping[str, Any], fields: Mapping[str, Any], index: int
) -> Answer:
    values = {**fields, **line["body"]}
    try:
        body = ChatBody(**values) if "messages" in values else CompletionBody(**values)
        refuse_unsupported(body)
        if body.n > 1:
            raise APIError(400, "n must be 1; give each answer its own line", code="invalid_value", param="n")
        model = served.resolve(body.model)
        limit = engine.model(model.name).context_limit
        ids, constraint = await _prompt(body, model, limit)
        request = generation_request(
            body, model, ids, request_id=f"generate-{index}", context_limit=limit, constraint=constraint
        )
    except ValidationError as error:
        raise CrossPoolError(f"{line['where']}: {from_validation(error.errors()).message}") from None
    except APIError as error:
        raise CrossPoolError(f"{line['where']}: {error.message}") from None
    prompt = values["messages"][-1].get("content") if "messages" in values else values["prompt"]
    return Answer(model.name, str(prompt), request)


async def _prompt(
    body: ChatBody | CompletionBody, model: ModelFrontend, limit: int
) -> tuple[list[int], TokenConstraint | None]:
    """The prompt's ids, and the grammar that the answer has to keep to."""
    if isinstance(body, ChatBody):
        plan = await chat_plan(body, model, limit)
        return plan.prompt, plan.constraint
    prompts = await completion_prompts(body, model, limit)
    if len(prompts) != 1:
        raise APIError(400, "prompt must be one text; give each its own line", code="invalid_value", param="prompt")
    asked = asked_grammar(body)
    return prompts[0], None if asked is None else await compiled(asked, body, model.vocabulary)


async def _run(engine: AsyncEngine, answer: Answer) -> None:
    """Fill `answer`; a full queue is waited for, since nobody else fills it."""
    try:
        while True:
            try:
                stream = engine.generate(answer.request)
                break
            except QueueFullError:
                await asyncio.sleep(RETRY_S)
        async for output in stream:
            answer.pieces.append(output.text)
            if output.error is not None:
                answer.error = str(output.error)
            elif output.finish_reason is not None:
                answer.finish_reason = str(output.finish_reason)
            answer.usage = {
                "prompt_tokens": output.usage.prompt_tokens,
                "completion_tokens": output.usage.completion_tokens,
            }
            answer.changed.set()
    except CrossPoolError as error:
        answer.error = str(error)
    finally:
        answer.changed.set()


async def _print_streams(answers: Sequence[Answer]) -> None:
    for answer in answers:
        print(f"[{answer.model}] {answer.prompt}", end="", flush=True)
        shown = 0
        while True:
            for piece in answer.pieces[shown:]:
                print(piece, end="", flush=True)
            shown = len(answer.pieces)
            if answer.has_ended:
                break
            answer.changed.clear()
            await answer.changed.wait()
        print(f"\n[{answer.model}] error: {answer.error}\n" if answer.error else "\n", flush=True)


async def _print_json(answers: Sequence[Answer]) -> None:
    async def one(answer: Answer) -> None:
        while not answer.has_ended:
            answer.changed.clear()
            await answer.changed.wait()
        print(json.dumps(answer.to_json(), ensure_ascii=False), flush=True)

    async with asyncio.TaskGroup() as group:
        for answer in answers:
            group.create_task(one(answer))
