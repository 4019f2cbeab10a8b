"""What the OpenAPI document says of those who watch."""

import msgspec

from dormouse.gateway.openapi_parts import TEXT, Schema, operation
from dormouse.watch.picture import Picture


def dashboard_schemas() -> dict[str, Schema]:
    """Made from the structs that are sent."""
    _, structs = msgspec.json.schema_components((Picture,), ref_template="#/components/schemas/{name}")
    return structs


def dashboard_paths() -> dict[str, dict[str, Schema]]:
    """The page itself is left out: browsers ask for it, not clients."""
    return {
        "/dormouse/picture": {"get": operation("All that the dashboard shows, once", "Picture")},
        "/dormouse/events": {"get": _events()},
    }


def _events() -> Schema:
    watching = operation("The picture, and then its changes, without an end", "Picture")
    watching["description"] = (
        "Server-sent events: `picture`, then `changes` with what differs, at most four a second; a comment now and "
        "then where nothing does; `goodbye` when the server stops. Who reads too slowly gets another `picture`."
    )
    watching["responses"]["200"]["content"] = {"text/event-stream": {"schema": TEXT}}
    return watching
