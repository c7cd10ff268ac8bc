"""What `WeightClient` raises beside the errors of the data plane. Client and server import it, for an error crosses the
wire by its code, and is of its class again where that is known."""

from omni_flow.data.errors import BadArgument, DataError


class LoadingElsewhere(DataError):
    """The time was up while another process was still loading; `holders` names it."""

    code = "loading-elsewhere"


class LoaderKeepsView(BadArgument):
    """A loader that kept an array or view of what it filled: the memory could not be sealed, and is given up."""

    code = "loader-keeps-view"


class SwitchRefused(BadArgument):
    """A version that lacks tensors of the current one; the message names some."""

    code = "switch-refused"
