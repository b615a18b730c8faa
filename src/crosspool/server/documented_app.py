"""The application's class: FastAPI, with an OpenAPI document that says what this server answers."""

from typing import Any

from fastapi import FastAPI

FOREIGN_SCHEMAS = ("HTTPValidationError", "ValidationError")


class DocumentedApp(FastAPI):
    """FastAPI documents a 422 of its own for wrong fields; here they are a 400, which routes declare themselves."""

    def openapi(self) -> dict[str, Any]:
        if self.openapi_schema is None:
            document = super().openapi()
            for methods in document["paths"].values():
                for route in methods.values():
                    route["responses"].pop("422", None)
            for name in FOREIGN_SCHEMAS:
                document["components"]["schemas"].pop(name, None)
            self.openapi_schema = document
        return self.openapi_schema
