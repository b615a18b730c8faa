"""POST /tokenize and /detokenize: text or a conversation to ids and back. POST /v1/embeddings: a clear 501."""

from typing import Annotated, Any

from fastapi import APIRouter, Request
from pydantic import BaseModel, Field
from starlette.responses import JSONResponse, Response

from crosspool.server.engine_client import info_of
from crosspool.server.errors import APIError, ErrorBody, bad_request
from crosspool.server.messages import Messages
from crosspool.server.prompts import chat_prompt, off_loop, text_ids
from crosspool.server.protocol import ChatBody, Flag, RequestBody
from crosspool.server.sampling import check_ids
from crosspool.server.stream import unless_left
from crosspool.server.tools import tool_use

router = APIRouter(tags=["tokens"])

ERRORS: dict[int | str, dict[str, Any]] = {
    400: {"model": ErrorBody, "description": "a field is wrong"},
    401: {"model": ErrorBody, "description": "the API key is missing or unknown"},
    404: {"model": ErrorBody, "description": "no model of that name is served"},
    413: {"model": ErrorBody, "description": "the body is too large"},
}
MAX_TOKENS = 1_000_000


class TokenizeBody(RequestBody):
    """Either `prompt` or `messages`; `tools` and the template's fields go with messages."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: Flag = Field(True, description="let the tokenizer add its begin token to a prompt")
    add_generation_prompt: Flag = True
    chat_template_kwargs: dict[str, Any] = Field({})
    tools: list[Any] = Field([])
    return_token_strs: Flag = Field(False, description="send the text of every token too")


class DetokenizeBody(RequestBody):
    """Token ids of one model."""

    model: str | None = None
    tokens: Annotated[list[Annotated[int, Field(strict=True, ge=0)]], Field(max_length=MAX_TOKENS)]


class Tokens(BaseModel):
    """The ids, their number, and what the model's context holds."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class Text(BaseModel):
    """The text of token ids, special tokens included."""

    prompt: str


@router.post("/tokenize", summary="Text or a conversation to token ids", responses=ERRORS)
async def tokenize(body: TokenizeBody, request: Request) -> Tokens:
    state = request.app.state
    model = state.catalogue.resolve(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise bad_request("send either prompt or messages", param="prompt" if body.prompt is None else "messages")
    if body.messages is not None:
        chat = ChatBody.model_construct(
            messages=body.messages,
            tools=body.tools,
            add_generation_prompt=body.add_generation_prompt,
            chat_template_kwargs=body.chat_template_kwargs,
        )
        ids = await unless_left(request, chat_prompt(chat, model, tool_use(chat), None))
    else:
        ids = await text_ids(body.prompt or "", model, None, add_special_tokens=body.add_special_tokens)
    return Tokens(
        count=len(ids),
        max_model_len=info_of(state.engine, model.name).context_limit,
        tokens=ids,
        token_strs=[model.tokenizer.token_text(token) for token in ids] if body.return_token_strs else None,
    )


@router.post("/detokenize", summary="Token ids to text", responses=ERRORS)
async def detokenize(body: DetokenizeBody, request: Request) -> Text:
    model = request.app.state.catalogue.resolve(body.model)
    check_ids(body.tokens, "tokens", model)
    decoded = await off_loop(lambda: model.tokenizer.decode(body.tokens, skip_special_tokens=False), len(body.tokens))
    return Text(prompt=decoded)


@router.post(
    "/v1/embeddings",
    summary="Not offered: no embedding model is served",
    responses={401: ERRORS[401], 501: {"model": ErrorBody, "description": "no embedding models are served"}},
    response_model=None,
    status_code=501,
)
async def embeddings() -> Response:
    error = APIError(501, "this server has no embedding models; ask one that does", code="not_offered")
    return JSONResponse(error.body(), error.status, {"X-Should-Retry": "false"})  # OpenAI's clients try a 5xx again
