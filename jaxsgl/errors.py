"""All errors that jaxsgl raises on purpose, as a tree: class, gRPC status, HTTP status, meaning.

    JaxsglError                  INTERNAL             500   our own bug, or a failure we can't name better
    |- InvalidRequest            INVALID_ARGUMENT     400   the client sent something that can never be served
    |- Unauthenticated           UNAUTHENTICATED      401   the API key is missing or wrong
    |- Forbidden                 PERMISSION_DENIED    403   the call is not for this client, whatever its key
    |- NotFound                  NOT_FOUND            404   no such model, request or method
    |- Overloaded                RESOURCE_EXHAUSTED   429   the queue is full, or the client reads too slowly
    |- Unsupported               UNIMPLEMENTED        501   a method of a known protocol that isn't built yet
    |- RequestFailed             FAILED_PRECONDITION  422   our own bug in the work for this one request
    |- EngineUnavailable         UNAVAILABLE          503   the engine is starting, stopping, stuck, dead or too busy
    |- TimedOut                  DEADLINE_EXCEEDED    504   the request ran longer than it may
    `- StartupError              (exit status 1)            the server can't start as it was asked to
       |- ConfigError                                       flags that contradict each other or the model
       `- CheckpointError                                   a model folder that is missing, broken or unsupported

Every message names the value, the limit and the way out. All parts may import this module; it imports none.
"""

RETRY_AFTER_S = 1  # clients are asked to wait this long before they try again


class JaxsglError(Exception):
    """The root of all errors that jaxsgl raises on purpose.

    `param` is the request's field at fault, and `code` OpenAI's name of the error, where they are known.
    """

    grpc_status: str = "INTERNAL"
    http_status: int = 500
    param: str | None = None
    code: str | None = None


class InvalidRequest(JaxsglError, ValueError):
    """The request can never be served as it is. No part of it has run."""

    grpc_status = "INVALID_ARGUMENT"
    http_status = 400


class Unauthenticated(JaxsglError):
    """The API key is missing or wrong."""

    grpc_status = "UNAUTHENTICATED"
    http_status = 401


class Forbidden(JaxsglError):
    """The client may not make this call: its key is not the administrator's, or a web page makes it."""

    grpc_status = "PERMISSION_DENIED"
    http_status = 403


class NotFound(JaxsglError):
    """The model, request or method that the client names doesn't exist here."""

    grpc_status = "NOT_FOUND"
    http_status = 404


class Overloaded(JaxsglError):
    """There is no room now; the same request may be sent again after `RETRY_AFTER_S` seconds."""

    grpc_status = "RESOURCE_EXHAUSTED"
    http_status = 429


class Unsupported(JaxsglError):
    """The method belongs to a known protocol, but isn't built here."""

    grpc_status = "UNIMPLEMENTED"
    http_status = 501


class RequestFailed(JaxsglError):
    """The work for this request failed by our own fault, and would fail again.

    Its statuses are those that neither gateways nor clients repeat: they carry 500 and INTERNAL to the next worker.
    """

    grpc_status = "FAILED_PRECONDITION"
    http_status = 422


class TimedOut(JaxsglError):
    """The request was ended because it took longer than the server allows."""

    grpc_status = "DEADLINE_EXCEEDED"
    http_status = 504


class EngineUnavailable(JaxsglError):
    """The engine can't take the request, or let it wait for too long. It may be sent again, elsewhere or later."""

    grpc_status = "UNAVAILABLE"
    http_status = 503


class StartupError(JaxsglError):
    """The server can't start; it ends with exit status 1 and this message."""


class ConfigError(StartupError, ValueError):
    """A flag's value is out of range or contradicts another flag or the model."""


class CheckpointError(StartupError):
    """The model folder is missing, broken, truncated or of an unsupported architecture."""


def in_one_line(error: Exception) -> str:
    """Returns what kind of error it is, and the beginning of its text."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:500]}"
