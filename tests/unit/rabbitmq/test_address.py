"""What a URL says, and what it does not show."""

from __future__ import annotations

import ssl

import pytest

from taskq.backends.rabbitmq.address import parse
from taskq.errors import ConfigurationError


def test_a_bare_url_means_the_usual():
    address = parse("amqp://")

    assert (address.host, address.port, address.vhost) == ("localhost", 5672, "/")
    assert (address.user, address.password, address.tls) == ("guest", "guest", False)


def test_every_part_of_a_url_is_percent_decoded():
    address = parse("amqps://m%40il:p%2Fw%3F@broker.example/%2Fprod%20eu?prefix=a%20b.&heartbeat=7")

    assert (address.user, address.password, address.vhost) == ("m@il", "p/w?", "/prod eu")
    assert (address.port, address.tls, address.prefix, address.heartbeat) == (5671, True, "a b.", 7)


def test_no_password_is_shown():
    address = parse("amqp://me:secret@[::1]:99/v?prefix=p.")

    assert address.location == "amqp://me:***@[::1]:99/v?prefix=p."
    with pytest.raises(ConfigurationError) as caught:
        parse("amqp://me:secret@host:port/")
    assert "secret" not in str(caught.value)


def test_the_urls_own_timeout_wins_over_the_setting():
    assert parse("amqp://", 5.0).publish_timeout == 5.0
    assert parse("amqp://?publish_timeout=2", 5.0).publish_timeout == 2.0


def test_certificates_are_verified_unless_told_otherwise():
    verified = parse("amqps://host").parameters("x").ssl_options
    assert verified.server_hostname == "host"
    assert verified.context.verify_mode is ssl.CERT_REQUIRED
    assert verified.context.check_hostname

    trusting = parse("amqps://host?verify=no").parameters("x").ssl_options
    assert trusting.context.verify_mode is ssl.CERT_NONE
    with pytest.raises(ConfigurationError, match="certificate file"):
        parse("amqps://host?cafile=/nowhere.pem").parameters("x")


def test_the_driver_is_told_what_the_url_says():
    parameters = parse("amqp://u:p@h:1/v?heartbeat=9&connect_timeout=3").parameters("publish")

    assert (parameters.host, parameters.port, parameters.virtual_host) == ("h", 1, "v")
    assert (parameters.heartbeat, parameters.stack_timeout) == (9, 3.0)
    assert parameters.client_properties["connection_name"] == "taskq publish"
