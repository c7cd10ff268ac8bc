"""The sockets of `unix://` and `ipc://` are files: who may reach them, and who owns an address."""

import pytest
from transport_kit import FILES, Net, settle

from omni_flow.control.transport import AddressError, AddressInUse, AddressTooLong, InsecureDirectory

pytestmark = pytest.mark.usefixtures("loop_name")
files = pytest.mark.parametrize("kind", FILES)


@pytest.mark.parametrize("kind", ["inproc", *FILES])
async def test_an_address_in_use_is_refused_and_its_owner_undisturbed(net: Net) -> None:
    a, inbox = await net.start("a")
    with pytest.raises(AddressInUse, match="live process"):
        await net.start("a")
    await settle(a, inbox)


@files
async def test_the_socket_directory_is_made_for_this_user_only(net: Net) -> None:
    await net.start("a")
    assert net.directory.stat().st_mode & 0o777 == 0o700
    assert net.files() == ["a"]


@files
@pytest.mark.parametrize("mode", [0o750, 0o701, 0o777])
async def test_a_directory_that_others_may_enter_is_refused(net: Net, mode: int) -> None:
    net.directory.mkdir()
    net.directory.chmod(mode)
    with pytest.raises(InsecureDirectory, match="chmod 700"):
        await net.start("a")


@files
async def test_a_symbolic_link_is_no_socket_directory(net: Net) -> None:
    elsewhere = net.directory.with_name("elsewhere")
    elsewhere.mkdir(mode=0o700)
    net.directory.symlink_to(elsewhere)
    with pytest.raises(InsecureDirectory, match="symbolic link"):
        await net.start("a")


@files
async def test_a_path_too_long_for_the_kernel_is_a_clear_error(net: Net) -> None:
    with pytest.raises(AddressTooLong, match="107"):
        net.make("x" * 108)


@pytest.mark.one_loop
@files
async def test_the_socket_file_of_a_dead_process_is_replaced(net: Net) -> None:
    dead = net.process("a", "echo")
    dead.kill()
    assert net.files() == ["a"]
    a, inbox = await net.start("a")
    await settle(a, inbox)


@files
async def test_a_file_that_is_no_socket_is_left_alone(net: Net) -> None:
    net.directory.mkdir(mode=0o700)
    note = net.directory / "a"
    note.write_text("mine")
    with pytest.raises(AddressError, match="no socket"):
        await net.start("a")
    assert note.read_text() == "mine"
    note.unlink()
