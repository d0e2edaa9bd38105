"""The error tree. Everyone may import it; it imports nothing.

    JaxsglError                  INTERNAL             500   our own bug, or a failure we can't name better
    |- InvalidRequest            INVALID_ARGUMENT     400   the client sent something that can never be served
    |- EngineUnavailable         UNAVAILABLE          503   the engine process is starting, stopping or dead
    `- StartupError              (exit status 1)            the server can't start as it was asked to
       |- ConfigError                                       flags that contradict each other or the model
       `- CheckpointError                                   a model folder that is missing, broken or unsupported

Every message names the value, the limit and the way out.
"""


class JaxsglError(Exception):
    """Root of all errors that jaxsgl raises on purpose."""

    grpc_status: str = "INTERNAL"
    http_status: int = 500


class InvalidRequest(JaxsglError, ValueError):
    """The request can never be served as it is; nothing of it has reached the engine."""

    grpc_status = "INVALID_ARGUMENT"
    http_status = 400


class EngineUnavailable(JaxsglError):
    """The engine process doesn't answer; the request may be sent again elsewhere or later."""

    grpc_status = "UNAVAILABLE"
    http_status = 503


class StartupError(JaxsglError):
    """The server ends with exit status 1 and this message."""


class ConfigError(StartupError, ValueError):
    """A flag's value is out of range or contradicts another flag or the model."""


class CheckpointError(StartupError):
    """The model folder is missing, broken, truncated or of an unsupported architecture."""
