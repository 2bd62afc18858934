"""The models of a server by name. All its ports share one catalog."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from shoal.server.errors import ApiError
from shoal.server.model import ServedModel

LATEST = ":latest"


class Catalog:
    def __init__(self, models: Sequence[ServedModel]) -> None:
        """models: at least one; the first answers requests that name none."""
        self._models = list(models)
        self._by_name = {name: model for model in self._models for name in model.names}

    def __iter__(self) -> Iterator[ServedModel]:
        return iter(self._models)

    @property
    def first(self) -> ServedModel:
        return self._models[0]

    @property
    def most_tokens(self) -> int:
        """The longest context of all models."""
        return max(model.max_model_len for model in self._models)

    def find(self, name: str | None) -> ServedModel:
        """The model of a request; the first if it names none. As in Ollama, a name may have the tag `:latest`
        or do without. Raises ApiError (404) for a name that no model has."""
        if name is None:
            return self.first
        for each in (name, name.removesuffix(LATEST), name + LATEST):
            if each in self._by_name:
                return self._by_name[each]
        names = ", ".join(model.name for model in self._models)
        raise ApiError(
            404,
            f"the model {name!r:.100} does not exist; there are {names}",
            param="model",
            code="model_not_found",
        )

    @property
    def draining(self) -> bool:
        """Whether the server is shutting down."""
        return any(model.admission.draining for model in self._models)
