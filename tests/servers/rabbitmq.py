"""RabbitMQ from the distribution's package, with the management plugin, as a node of its own."""

from __future__ import annotations

import base64
import os
import pathlib
import shutil
import socket
import subprocess
import urllib.request
from collections.abc import Iterable
from typing import Any

from tests.servers.processes import Running, ServerError, listens

#: The package's own start script; the one on the path changes to another user first.
_SERVER = pathlib.Path("/usr/lib/rabbitmq/bin/rabbitmq-server")
_PROTOCOL_HEADER = b"AMQP\x00\x00\x09\x01"


def install(_directory: pathlib.Path) -> None:
    """Check that the distribution's package is there."""
    if not _SERVER.exists() or shutil.which("epmd") is None:
        raise ServerError("RabbitMQ is not installed: apt-get install rabbitmq-server")


def start(running: Running) -> str:
    """Start its port mapper and the broker; returns the URL once AMQP and management answer."""
    mapper, amqp, management, distribution = (
        running.port(name) for name in ("epmd", "amqp", "management", "distribution")
    )
    running.spawn([str(shutil.which("epmd")), "-port", str(mapper), "-address", "127.0.0.1"])
    running.wait("epmd", lambda: listens(mapper))
    environ = _environ(running, amqp, distribution)
    _write_config(running, management)
    running.spawn([_SERVER], environ)
    running.wait("rabbitmq", lambda: _speaks_amqp(amqp) and _manages(management))
    return f"amqp://guest:guest@127.0.0.1:{amqp}/"


def management_url(running: Running) -> str:
    """The management interface, user and password guest."""
    return f"http://127.0.0.1:{running.ports['management']}"


def control(running: Running, *words: str) -> str:
    """What ``rabbitmqctl`` says to this node."""
    node = {**os.environ, **_node(running)}
    command = ["/usr/lib/rabbitmq/bin/rabbitmqctl", "--quiet", *words]
    done = subprocess.run(command, env=node, capture_output=True, text=True, timeout=120, check=False)
    if done.returncode:
        raise ServerError(f"rabbitmqctl {' '.join(words)}: {(done.stdout + done.stderr)[-2000:]}")
    return done.stdout


def _node(running: Running) -> dict[str, str]:
    """How this node is found."""
    return {
        "HOME": str(running.folder("home")),
        "ERL_EPMD_PORT": str(running.ports["epmd"]),
        "ERL_EPMD_ADDRESS": "127.0.0.1",
        "RABBITMQ_NODENAME": "taskq@localhost",
        "RABBITMQ_CONF_ENV_FILE": "/dev/null",
    }


def _write_config(running: Running, management: int) -> None:
    config = running.folder("etc")
    (config / "enabled_plugins").write_text("[rabbitmq_management].\n", encoding="ascii")
    (config / "rabbitmq.conf").write_text(
        f"management.tcp.ip = 127.0.0.1\nmanagement.tcp.port = {management}\n"
        "vm_memory_high_watermark.absolute = 1GB\ndisk_free_limit.absolute = 50MB\n"
        "collect_statistics_interval = 1000\nlog.console = true\nlog.console.level = warning\nlog.file = false\n",
        encoding="ascii",
    )


def _environ(running: Running, amqp: int, distribution: int) -> dict[str, str]:
    config, data = running.folder("etc"), running.folder("data")
    return {
        **_node(running),
        "ERL_CRASH_DUMP_SECONDS": "0",
        "RABBITMQ_NODE_IP_ADDRESS": "127.0.0.1",
        "RABBITMQ_NODE_PORT": str(amqp),
        "RABBITMQ_DIST_PORT": str(distribution),
        "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": "-kernel inet_dist_use_interface {127,0,0,1} -start_epmd false",
        "RABBITMQ_CONFIG_FILE": str(config / "rabbitmq.conf"),
        "RABBITMQ_ADVANCED_CONFIG_FILE": str(config / "none.config"),
        "RABBITMQ_ENABLED_PLUGINS_FILE": str(config / "enabled_plugins"),
        "RABBITMQ_MNESIA_BASE": str(data),
        "RABBITMQ_LOG_BASE": str(running.folder("log")),
        "RABBITMQ_PID_FILE": str(running.folder("run") / "pid"),
        # Makes the script become the broker instead of standing before it: one process, one pid.
        "RUNNING_UNDER_SYSTEMD": "true",
    }


def _speaks_amqp(port: int) -> bool:
    """Whether the broker answers a client's greeting, which it does when it has booted."""
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=2.0) as connection:
            connection.sendall(_PROTOCOL_HEADER)
            return connection.recv(1) == b"\x01"
    except OSError:
        return False


def _manages(port: int) -> bool:
    who = base64.b64encode(b"guest:guest").decode("ascii")
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/api/overview", headers={"Authorization": f"Basic {who}"}
    )
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=2.0) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def sweep(url: str, queues: Iterable[str]) -> None:
    """Delete everything that jobs of ``queues`` needed, under the prefix that ``url`` names."""
    import pika

    from taskq.backends.rabbitmq.address import parse
    from taskq.backends.rabbitmq.layout import Exchange, Layout, Queue

    address = parse(url)
    layout = Layout(address.prefix)
    connection = pika.BlockingConnection(address.parameters("sweep"))
    try:
        channel = connection.channel()
        there = [each for queue in {"tasks", *queues} for each in layout.queue(queue)]
        if _there(connection, layout.unrouted):
            there += layout.ladder()
        for each in there:
            if isinstance(each, Queue):
                channel.queue_delete(each.name)
            elif isinstance(each, Exchange):
                channel.exchange_delete(each.name)
    finally:
        connection.close()


def _there(connection: Any, queue: str) -> bool:
    from pika.exceptions import ChannelClosedByBroker

    try:
        connection.channel().queue_declare(queue, passive=True)
    except ChannelClosedByBroker:
        return False
    return True
