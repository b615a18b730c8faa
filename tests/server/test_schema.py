"""schemathesis over every route: no 500, nothing that the OpenAPI document does not declare."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.fake_engine import FakeEngine
from tests.support.server_fixtures import fake_app

pytestmark = pytest.mark.api
EXAMPLES = 15  # of each route
REFUSED = {("/v1/embeddings", 501)}  # there, and said not to be offered
ENDLESS = ("/stats/stream",)  # it ends when the client leaves, which an in-process client never does


@pytest.fixture(scope="module")
def schema(tmp_path_factory: pytest.TempPathFactory) -> Any:
    from schemathesis import openapi

    engine = FakeEngine(("tiny", "other"))
    app = fake_app(engine, tmp_path_factory.mktemp("models"), admin_api_keys=("boss",), api_keys=("user",))
    return openapi.from_asgi("/openapi.json", app, headers={"Authorization": "Bearer boss"})


def test_answers_are_what_the_document_says(schema: Any) -> None:
    from hypothesis import HealthCheck, Phase, given, settings
    from schemathesis import checks

    seen = []
    for result in schema.get_all_operations():
        operation = result.ok()
        if operation.path in ENDLESS:
            continue
        seen.append(operation.path)

        @settings(
            max_examples=EXAMPLES,
            deadline=None,
            derandomize=True,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(case=operation.as_strategy())
        def check(case: Any) -> None:
            if isinstance(case.body, dict) and "model" in case.body:
                case.body["model"] = "tiny"  # a served one, so that other fields matter
            response = case.call(headers={"Authorization": "Bearer boss"})
            assert response.status_code < 500 or (case.path, response.status_code) in REFUSED, response.text
            case.validate_response(
                response,
                checks=[
                    checks.status_code_conformance,
                    checks.content_type_conformance,
                    checks.response_schema_conformance,
                ],
            )

        check()
    assert len(seen) >= 14, seen
