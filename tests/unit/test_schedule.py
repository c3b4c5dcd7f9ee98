"""Schedules: cron against a brute-force reading of the wall clock, fixed periods, and what was missed."""

from __future__ import annotations

import calendar
import functools
import math
import zoneinfo
from datetime import UTC, datetime, timedelta, timezone
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from taskq.errors import ConfigurationError, InvalidArgumentError
from taskq.schedule import Cron, Every, Overlap, cron, crontab, due_instants, every, run_all, run_once, skip

MINUTE = timedelta(minutes=1)


def at(text, zone="UTC", fold=0):
    return datetime.fromisoformat(text).replace(tzinfo=ZoneInfo(zone), fold=fold)


def instants(schedule, begin, end):
    found = []
    moment = begin
    while (moment := schedule.next(moment)) is not None and moment <= end:
        assert moment.tzinfo is UTC
        found.append(moment)
    return found


# -- cron against brute force ---------------------------------------------------------
#
# The oracle shares nothing with the code under test: it has its own parser, and reads the wall clock of every
# minute of a window in UTC.

EXPRESSIONS = [
    "0 0 * * *",
    "30 0 * * *",
    "0 1 * * *",
    "30 1 * * *",
    "59 1 * * *",
    "0 2 * * *",
    "15 2 * * *",
    "30 2 * * *",
    "0 3 * * *",
    "30 3 * * *",
    "45 23 * * *",
    "0,30 1-3 * * *",
    "10-50/20 0,2,4 * * *",
    "5 */6 * * *",
    "0 * * * *",
    "30 * * * *",
    "*/15 * * * *",
    "*/20 2 * * *",
    "*/30 1,2 * * *",
    "* 2 * * *",
    "*/7 0-3 * * *",
    "0 2 * * SUN",
    "30 2 * 3,10,11 SUN",
    "30 1 * * 6,0",
    "0 2 1-7 * 1",
    "30 2 */2 * *",
    "*/45 */3 * * 1-5",
    "0 12 * * *",
    "0 0 1 * *",
    "30 2 L * *",
    "0 2 * * 0L",
    "0 2 * * SUN#2",
]
NAMES = {name: str(n) for n, name in enumerate(["SUN", "MON", "TUE", "WED", "THU", "FRI", "SAT"])}


def numbers(field, low, high):
    found = set()
    for part in field.split(","):
        span, _, step = part.partition("/")
        if span == "*":
            first, last = low, high
        else:
            first, _, last = span.partition("-")
            first, last = int(first), int(last or first)
        found.update(range(first, last + 1, int(step or 1)))
    return found


@functools.cache
def days(expression):
    """The question whether a date matches."""
    _, _, month_days, months, week_days = expression.split()
    week_days = NAMES.get(week_days.partition("#")[0], week_days.partition("#")[0]) + week_days[3:]
    by_month_day = _month_days(month_days)
    by_week_day = _week_days(week_days)
    both = month_days.startswith("*") or week_days.startswith("*")
    months = numbers(months, 1, 12)

    def match(date):
        if date.month not in months:
            return False
        return (all if both else any)([by_month_day(date), by_week_day(date)])

    return match


def _month_days(field):
    if field == "L":
        return lambda date: date.day == calendar.monthrange(date.year, date.month)[1]
    wanted = numbers(field, 1, 31)
    return lambda date: date.day in wanted


def _week_days(field):
    if field.endswith("L"):
        wanted = int(field[:-1])
        return lambda date: date.isoweekday() % 7 == wanted and (date + timedelta(7)).month != date.month
    if "#" in field:
        wanted, nth = map(int, field.split("#"))
        return lambda date: date.isoweekday() % 7 == wanted and (date.day - 1) // 7 == nth - 1
    wanted = numbers(field, 0, 6)
    return lambda date: date.isoweekday() % 7 in wanted


class Window:
    """The wall clock of a zone, minute by minute."""

    def __init__(self, zone, begin, end):
        self.begin, self.end = begin, end
        self.minutes = []
        moment = begin
        while moment <= end:
            self.minutes.append((moment, moment.astimezone(zone).replace(tzinfo=None)))
            moment += MINUTE

    @functools.cached_property
    def first_times(self):
        """Every nominal minute, also the skipped ones, with the first instant that it comes or would have come."""
        found = {}
        previous = self.minutes[0][1] - MINUTE
        for instant, wall in self.minutes:
            nominal = previous + MINUTE
            while nominal < wall:  # a gap
                found.setdefault(nominal, instant)
                nominal += MINUTE
            found.setdefault(wall, instant)
            previous = max(previous, wall)
        return found

    def expected(self, expression):
        minute, hour, *_ = expression.split()
        minutes, hours, on_day = numbers(minute, 0, 59), numbers(hour, 0, 23), days(expression)
        fixed = not minute.startswith("*") and not hour.startswith("*")
        pairs = ((i, w) for w, i in self.first_times.items()) if fixed else self.minutes
        matching = {i for i, w in pairs if w.minute in minutes and w.hour in hours and on_day(w.date())}
        return sorted(matching - {self.begin})


def offset(zone, moment):
    return moment.astimezone(zone).utcoffset()


def transitions(zone, first, last):
    while first < last:
        later = first + timedelta(hours=12)
        if offset(zone, first) != offset(zone, later):
            before, after = first, later
            while after - before > MINUTE:
                middle = before + (after - before) // 2
                middle = middle.replace(second=0)
                before, after = (
                    (middle, after) if offset(zone, middle) == offset(zone, before) else (before, middle)
                )
            yield after
        first = later


def windows():
    """For every zone, the days around every change of its offset in three years; around one that is none, else."""
    for name in sorted(zoneinfo.available_timezones()):
        zone = ZoneInfo(name)
        changes = list(transitions(zone, at("2024-01-01"), at("2027-01-01"))) or [at("2025-06-15T07:00")]
        for change in changes:
            alike = (change, offset(zone, change - MINUTE), offset(zone, change))
            yield alike, name, change.astimezone(UTC)


def check(name, change):
    window = Window(ZoneInfo(name), change - timedelta(hours=27), change + timedelta(hours=27))
    for expression in EXPRESSIONS:
        schedule = cron(expression, timezone=name)
        found = instants(schedule, window.begin, window.end)
        assert window.expected(expression) == found, (name, expression, change)


def test_cron_agrees_with_the_wall_clock_around_every_kind_of_transition():
    different = {alike: (name, change) for alike, name, change in windows()}
    assert len(different) > 100
    for name, change in different.values():
        check(name, change)


@pytest.mark.slow
def test_cron_agrees_with_the_wall_clock_around_every_transition_of_every_zone():
    for _, name, change in windows():
        check(name, change)


@pytest.mark.parametrize("name", ["UTC", "Australia/Lord_Howe", "Africa/Casablanca"])
def test_cron_agrees_with_the_wall_clock_all_year(name):
    for month in range(1, 13):
        begin = datetime(2024, month, 1, tzinfo=UTC)
        window = Window(ZoneInfo(name), begin, begin + timedelta(days=32))
        for expression in ("30 2 * * *", "*/30 1-2 * * *", "0 0 29 2 *", "30 1 * * SUN#2"):
            found = instants(cron(expression, timezone=name), window.begin, window.end)
            assert window.expected(expression) == found


@settings(deadline=None)
@given(
    st.datetimes(datetime(2000, 1, 1), datetime(2040, 1, 1), timezones=st.timezones()),  # noqa: DTZ001
    st.sampled_from(EXPRESSIONS),
    st.timezones(),
)
def test_next_is_later_and_nothing_lies_between(after, expression, zone):
    schedule = cron(expression, timezone=zone)
    instant = schedule.next(after)
    assert instant > after
    assert schedule.next(instant - timedelta(microseconds=1)) == instant
    middle = after.astimezone(UTC) + (instant - after.astimezone(UTC)) / 2
    if middle < instant:
        assert schedule.next(middle) == instant


# -- cron by example ------------------------------------------------------------------


def local(schedule, begin, count):
    found = []
    for _ in range(count):
        begin = schedule.next(begin)
        found.append(begin.astimezone(schedule.zone).strftime("%d %H:%M %z"))
    return found


def test_a_skipped_time_runs_once_right_after_the_gap():
    schedule = cron("0,30 2 * * *", timezone="Europe/Paris")
    assert local(schedule, at("2026-03-28T12:00"), 2) == ["29 03:00 +0200", "30 02:00 +0200"]


def test_a_time_that_comes_twice_runs_at_its_first_coming():
    schedule = cron("30 2 * * *", timezone="Europe/Paris")
    assert local(schedule, at("2026-10-24T12:00"), 2) == ["25 02:30 +0200", "26 02:30 +0100"]
    second_pass = at("2026-10-25T02:10", "Europe/Paris", fold=1)
    assert local(schedule, second_pass, 1) == ["26 02:30 +0100"]


def test_an_hourly_job_runs_every_hour_of_a_night_that_is_longer_or_shorter():
    schedule = cron("30 * * * *", timezone="Europe/Paris")
    assert local(schedule, at("2026-10-25T00:00"), 3) == [
        "25 02:30 +0200",
        "25 02:30 +0100",
        "25 03:30 +0100",
    ]
    assert local(schedule, at("2026-03-29T00:00"), 2) == ["29 01:30 +0100", "29 03:30 +0200"]


def test_six_fields_begin_with_seconds_and_run_in_real_time():
    schedule = cron("*/20 30 2 * * *", timezone="Europe/Paris")
    found = [schedule.next(at("2026-01-01T01:30:00"))]
    assert [at("2026-01-01T01:30:20")] == found
    day = instants(schedule, at("2026-10-25T00:00"), at("2026-10-25T12:00"))
    assert len(day) == 6
    assert not instants(schedule, at("2026-03-29T00:00"), at("2026-03-29T12:00"))


@pytest.mark.parametrize(
    ("expression", "after", "expected"),
    [
        ("0 0 L * *", "2026-02-01", "2026-02-28T00:00"),
        ("0 0 LW * *", "2026-02-01", "2026-02-27T00:00"),
        ("0 0 * * 5L", "2026-02-01", "2026-02-27T00:00"),
        ("0 0 * * FRI#2", "2026-02-01", "2026-02-13T00:00"),
        ("0 9 * JAN-MAR MON-FRI", "2026-03-31T10:00", "2027-01-01T09:00"),
        ("0 0 29 2 *", "2026-01-01", "2028-02-29T00:00"),
        ("0 0 13 * FRI", "2026-02-01", "2026-02-06T00:00"),
        ("@daily", "2026-02-01", "2026-02-02T00:00"),
        ("@Weekly", "2026-02-02", "2026-02-08T00:00"),
        ("@yearly", "2026-02-02", "2027-01-01T00:00"),
        ("* * * * *", "2026-02-02T00:00:59.999999", "2026-02-02T00:01"),
        ("* * * * *", "2026-02-02T00:00:00.000001", "2026-02-02T00:01"),
        ("0 0 * * 7", "2026-02-02", "2026-02-08T00:00"),
    ],
)
def test_cron_by_example(expression, after, expected):
    assert at(expected) == cron(expression).next(at(after))


@pytest.mark.parametrize(
    ("expression", "field"),
    [
        ("60 * * * *", "minute"),
        ("x * * * *", "minute"),
        ("*/0 * * * *", "minute"),
        ("5-1 * * * *", "minute"),
        (", * * * *", "minute"),
        ("* 24 * * *", "hour"),
        ("* * 0 * *", "day-of-month"),
        ("0 0 30 2 *", "day-of-month"),
        ("* * * 13 *", "month"),
        ("* * * FOO *", "month"),
        ("* * * * 8", "day-of-week"),
        ("* * * * MON#6", "day-of-week"),
        ("* * * * XL", "day-of-week"),
        ("60 * * * * *", "second"),
        ("* * * *", "five fields"),
        ("* * * * * * *", "five fields"),
        ("", "five fields"),
        ("@reboot", "five fields"),
    ],
)
def test_a_wrong_expression_is_refused_by_its_field(expression, field):
    with pytest.raises(ConfigurationError, match=field):
        cron(expression)


@given(st.text(alphabet="0123456789*/,-LW#MONJA @?²٣", max_size=20))
def test_any_text_is_an_expression_or_a_configuration_error(text):
    try:
        cron(text).next(at("2026-01-01"))
    except ConfigurationError:
        return


@pytest.mark.parametrize("zone", ["Nowhere/Land", "", "../etc/passwd", "Europe"])
def test_an_unknown_zone_is_refused(zone):
    with pytest.raises(ConfigurationError, match="timezone"):
        cron("* * * * *", timezone=zone)


def test_any_tzinfo_is_a_zone():
    schedule = cron("0 12 * * *", timezone=timezone(timedelta(hours=5, minutes=45)))
    assert at("2026-01-01T06:15") == schedule.next(at("2026-01-01"))


def test_start_and_end_are_both_included():
    schedule = cron("0 * * * *", start=at("2026-01-01T05:00"), end=at("2026-01-01T07:00"))
    assert [at(f"2026-01-01T0{hour}:00") for hour in (5, 6, 7)] == instants(
        schedule, at("2026-01-01"), at("2027-01-01")
    )
    assert schedule.next(at("2026-01-01T07:00")) is None


def test_an_expression_that_never_comes_again_has_no_next():
    assert cron("0 0 1 1 *").next(datetime.max.replace(tzinfo=UTC) - timedelta(days=1)) is None


def test_celerys_form_wants_both_days():
    assert at("2026-02-13T00:00") == crontab(0, 0, day_of_week="fri", day_of_month="13").next(
        at("2026-01-01")
    )
    assert at("2026-01-01T00:15") == crontab(minute=[45, 15], hour="*/6").next(at("2026-01-01"))
    assert at("2026-01-01T00:01") == crontab().next(at("2026-01-01"))
    assert at("2026-01-04T07:30") == crontab("30", 7, "sun, sat").next(at("2026-01-03T08:00"))
    with pytest.raises(ConfigurationError, match="minute"):
        crontab(minute=[])
    with pytest.raises(ConfigurationError, match="hour"):
        crontab(hour=24)


def test_schedules_are_values():
    assert cron("0 0 * * *") == cron(" 0 0 * * * ") == cron("@daily")
    assert hash(every(5)) == hash(every(timedelta(seconds=5)))
    assert cron("0 0 * * *") != cron("0 0 * * *", timezone="Europe/Paris")


@pytest.mark.parametrize("expression", [*EXPRESSIONS, "*/10 * * * * *", "0 0 LW * *"])
def test_a_schedule_says_what_it_is(expression):
    assert "Europe/Paris" in cron(expression, timezone="Europe/Paris").describe()
    assert "UTC" in cron(expression).describe()


def test_a_period_says_what_it_is():
    assert every(300).describe() == "every 0:05:00"


# -- fixed periods --------------------------------------------------------------------


def test_a_period_counts_from_its_anchor():
    assert at("2026-01-01T00:10") == every(600).next(at("2026-01-01T00:00"))
    assert at("2026-01-01T00:03") == every(600, anchor=at("2030-01-01T00:03")).next(at("2026-01-01"))
    schedule = every(600, start=at("2026-01-01T00:03"), end=at("2026-01-01T00:20"))
    expected = [at("2026-01-01T00:03"), at("2026-01-01T00:13")]
    assert expected == instants(schedule, at("2025-01-01"), at("2027-01-01"))


@given(st.integers(10_000, 10**13), st.datetimes(datetime(1800, 1, 1), datetime(2200, 1, 1)))  # noqa: DTZ001
def test_a_period_is_exact(microseconds, naive):
    period = timedelta(microseconds=microseconds)
    after = naive.replace(tzinfo=UTC)
    instant = every(period).next(after)
    assert after < instant <= after + period
    assert (instant - datetime(1970, 1, 1, tzinfo=UTC)) % period == timedelta(0)


@pytest.mark.parametrize("wrong", [0, -1, 0.001, math.nan, math.inf, True, "5", None, 10**400])
def test_a_period_must_be_one(wrong):
    with pytest.raises(InvalidArgumentError):
        every(wrong)


def test_a_period_ends_with_the_calendar():
    assert every(86_400 * 365).next(datetime.max.replace(tzinfo=UTC)) is None


NAIVE = datetime(2026, 1, 1)  # noqa: DTZ001


@pytest.mark.parametrize(
    "call",
    [
        lambda: cron("* * * * *").next(NAIVE),
        lambda: every(5).next(NAIVE),
        lambda: cron("* * * * *", start=NAIVE),
        lambda: every(5, end=NAIVE),
        lambda: every(5, anchor=NAIVE),
        lambda: due_instants(every(5), NAIVE, at("2026-01-01"), skip()),
        lambda: due_instants(every(5), at("2026-01-01"), NAIVE, skip()),
    ],
)
def test_naive_datetimes_are_refused(call):
    with pytest.raises(InvalidArgumentError, match="has no time zone"):
        call()


# -- jitter ---------------------------------------------------------------------------


def test_jitter_is_the_same_for_everyone_and_within_bounds():
    schedule = cron("0 * * * *", jitter=60)
    moments = instants(schedule, at("2026-01-01"), at("2026-02-01"))
    spreads = [schedule.spread(moment) for moment in moments]
    assert spreads == [cron("0 * * * *", jitter=60).spread(moment) for moment in moments]
    assert all(timedelta(0) <= spread < timedelta(seconds=60) for spread in spreads)
    assert len(set(spreads)) > 700
    assert timedelta(0) == cron("0 * * * *").spread(moments[0]) == every(5).spread(moments[0])
    assert every(5, jitter=2).spread(moments[0]) != every(6, jitter=2).spread(moments[0])


# -- what is due ----------------------------------------------------------------------

HOURLY = every(3600)
NOON = at("2026-01-01T12:00")


def hours(*numbers):
    return [at(f"2026-01-01T{number:02}:00") for number in numbers]


def test_nothing_is_due_between_two_instants():
    assert due_instants(HOURLY, NOON, NOON + timedelta(minutes=59), run_all()) == []


def test_an_instant_is_due_once():
    now = NOON + timedelta(seconds=1)
    assert hours(12) == due_instants(HOURLY, NOON - MINUTE, now, skip())
    assert due_instants(HOURLY, NOON, now, run_all()) == []


@pytest.mark.parametrize(
    ("misfire", "catch_up", "expected"),
    [
        (skip(), None, []),
        (skip(tolerance=1800), None, hours(12)),
        (run_once(), None, hours(12)),
        (run_once(max_age=600), None, []),
        (run_once(max_age=1800), None, hours(12)),
        (run_once(), 600, []),
        (run_all(), None, hours(8, 9, 10, 11, 12)),
        (run_all(2), None, hours(11, 12)),
        (run_all(10, max_age=2 * 3600), None, hours(11, 12)),
        (run_all(10, max_age=1.5 * 3600), None, hours(11, 12)),
        (run_all(10, max_age=2.5 * 3600), None, hours(10, 11, 12)),
        (run_all(10), timedelta(hours=1.5), hours(11, 12)),
    ],
)
def test_what_was_missed(misfire, catch_up, expected):
    last, now = at("2026-01-01T07:00"), at("2026-01-01T12:30")
    assert expected == due_instants(HOURLY, last, now, misfire, catch_up)


class Counting:
    def __init__(self, schedule):
        self.schedule = schedule
        self.asked = 0

    def next(self, after):
        self.asked += 1
        return self.schedule.next(after)


def test_a_year_of_missed_seconds_costs_few_questions():
    counting = Counting(every(1))
    found = due_instants(counting, at("2025-01-01"), at("2026-01-01T00:00:00.5"), run_all(3))
    assert [at("2025-12-31T23:59:58"), at("2025-12-31T23:59:59"), at("2026-01-01")] == found
    assert counting.asked < 150
    usual = Counting(every(1))
    due_instants(usual, at("2025-12-31T23:59:59"), at("2026-01-01"), run_once())
    assert usual.asked <= 2


def test_a_clock_set_back_repeats_nothing_and_a_clock_set_forward_repeats_nothing():
    last = NOON
    back = due_instants(HOURLY, last, NOON - timedelta(hours=3), run_all())
    forward = due_instants(HOURLY, last, NOON + timedelta(hours=3), run_once())
    assert back == []
    assert hours(15) == forward
    assert due_instants(HOURLY, forward[-1], NOON + timedelta(minutes=1), run_all()) == []  # and back again


def test_a_record_from_the_far_future_does_not_freeze_the_schedule():
    now = NOON + timedelta(seconds=5)
    assert hours(12) == due_instants(HOURLY, at("2030-01-01"), now, run_all())
    assert due_instants(HOURLY, at("2030-01-01"), NOON + timedelta(minutes=5), run_all()) == []


def test_the_end_of_a_schedule_is_the_end():
    schedule = every(3600, end=NOON)
    assert hours(11, 12) == due_instants(schedule, at("2026-01-01T10:00"), at("2027-01-01"), run_all())
    assert due_instants(schedule, NOON, at("2027-01-01"), run_all()) == []


@settings(deadline=None, max_examples=200)
@given(
    period=st.integers(1, 10_000),
    gone=st.integers(0, 200_000),
    most=st.integers(1, 20),
    max_age=st.none() | st.integers(0, 200_000),
)
def test_what_is_due_is_the_latest_of_all_that_was_missed(period, gone, most, max_age):
    last = NOON + timedelta(seconds=0.25)
    now = last + timedelta(seconds=gone)
    missed = instants(every(period), last, now)
    young = [m for m in missed if max_age is None or now - m <= timedelta(seconds=max_age)]
    assert young[-most:] == due_instants(every(period), last, now, run_all(most, max_age=max_age))


@settings(deadline=None, max_examples=100)
@given(st.lists(st.integers(1, 20_000), max_size=15), st.sampled_from([HOURLY, cron("*/7 * * * *")]))
def test_looking_often_or_seldom_finds_each_instant_once(steps, schedule):
    begin = last = now = NOON
    found = []
    for step in steps:
        now += timedelta(seconds=step)
        due = due_instants(schedule, last, now, run_all(10_000))
        found += due
        last = due[-1] if due else last
    assert instants(schedule, begin, now) == found


@pytest.mark.parametrize(
    "call", [lambda: run_all(0), lambda: run_all(True), lambda: run_all(10**9), lambda: skip(-1)]
)
def test_a_misfire_policy_of_nonsense_is_refused(call):
    with pytest.raises(InvalidArgumentError):
        call()


def test_overlap_policies_have_names():
    assert [Overlap(n) for n in ("skip", "queue_one", "allow")] == [
        Overlap.SKIP,
        Overlap.QUEUE_ONE,
        Overlap.ALLOW,
    ]


def test_the_types_are_public():
    assert isinstance(cron("* * * * *"), Cron)
    assert isinstance(every(1), Every)
