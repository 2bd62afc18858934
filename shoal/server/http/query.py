"""The parameters of a URL's query, read and checked. Mistakes in them are an ApiError (400) that names the
parameter."""

from __future__ import annotations

from shoal.errors import RequestError
from shoal.server.http.exchange import Exchange

Query = dict[str, list[str]]


def query_of(exchange: Exchange, known: tuple[str, ...]) -> Query:
    """The URL's parameters. An unknown one is refused: a misspelt `tag=` would put everything to sleep."""
    query = exchange.query()
    if unknown := [name for name in query if name not in known]:
        raise RequestError(
            f"unknown parameter {unknown[0]!r:.40}; {exchange.path} takes {', '.join(known)}",
            field=unknown[0][:40],
        )
    return query


def one_of(query: Query, name: str, default: str = "") -> str:
    """Returns the value of a parameter that may be given once."""
    values = query.get(name, [default])
    if len(values) > 1:
        raise RequestError(
            f"{name} must be given once, got it {len(values)} times; drop the others", field=name
        )
    return values[0]


def count_of(query: Query, name: str, most: int) -> int:
    """Returns a number from 1 to `most`, which is also the default."""
    text = one_of(query, name, str(most))
    number = int(text) if text.isascii() and text.isdigit() and len(text) <= len(str(most)) else 0
    if not 1 <= number <= most:
        raise RequestError(f"{name} must be from 1 to {most}, got {text!r:.40}; choose one", field=name)
    return number
