"""The models of a server by name. All its ports share one catalog. In a router it changes while it runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar

from shoal.server.errors import ApiError
from shoal.server.served.admission import Admission
from shoal.server.served.external_model import ExternalModel
from shoal.server.served.model import ServedModel

LATEST = ":latest"


class Catalog:
    """Iterating yields the models of this process and of native workers. `external`: models of external
    workers."""

    def __init__(self, models: Sequence[ServedModel], external: Sequence[ExternalModel] = ()) -> None:
        """The first model answers requests that name none."""
        self._models = list(models)
        self.external = list(external)
        self.awaited: list[str] = []  # workers not reached yet, which may bring further models
        self.draining = False  # the server is shutting down

    def __iter__(self) -> Iterator[ServedModel]:
        return iter(self._models)

    def add(self, model: ServedModel | ExternalModel) -> None:
        if self.draining:
            model.admission.drain()
        if isinstance(model, ExternalModel):
            self.external.append(model)
        else:
            self._models.append(model)

    def remove(self, model: ServedModel | ExternalModel) -> None:
        if isinstance(model, ExternalModel):
            self.external.remove(model)
        else:
            self._models.remove(model)

    @property
    def names(self) -> list[str]:
        return [model.name for model in self._models] + [model.name for model in self.external]

    @property
    def most_tokens(self) -> int:
        """The longest context of all models."""
        return max((model.max_model_len for model in self._models), default=0)

    def find(self, name: str | None) -> ServedModel:
        """Returns the model of a request; the first without a name. As in Ollama, the tag `:latest` is
        optional. Raises ApiError for an unknown name: 404, or 503 while workers may still bring it."""
        if name is None and self._models:
            return self._models[0]
        found = _find(self._models, name)
        if found is not None:
            return found
        if (external := self.find_external(name)) is not None:
            raise ApiError(404, f"the workers of {external.name!r:.100} have no such route", param="model")
        if self.awaited or not self.names:
            awaited = f" ({', '.join(self.awaited)})" if self.awaited else ""
            asked = "no model" if name is None else f"no model {name!r:.100}"
            raise ApiError(503, f"there is {asked} yet: workers were not reached{awaited}; try again later")
        raise ApiError(
            404,
            f"the model {name!r:.100} does not exist; choose {' or '.join(self.names)}",
            param="model",
            code="model_not_found",
        )

    def find_external(self, name: str | None) -> ExternalModel | None:
        """Returns the external model of a request, found as in `find`; None if no external model has the
        name."""
        if name is None:
            return self.external[0] if self.external and not self._models else None
        return None if _find(self._models, name) is not None else _find(self.external, name)

    @property
    def admissions(self) -> list[Admission]:
        return [model.admission for model in self._models] + [model.admission for model in self.external]

    def drain(self) -> None:
        """Admits no more requests, also for models that are added later."""
        self.draining = True
        for admission in self.admissions:
            admission.drain()


M = TypeVar("M", ServedModel, ExternalModel)


def _find(models: Sequence[M], name: str | None) -> M | None:
    if name is None:
        return None
    for each in (name, name.removesuffix(LATEST), name + LATEST):
        for model in models:
            if each in model.names:
                return model
    return None
