"""Charts as SVG text."""

from __future__ import annotations

from xml.etree import ElementTree

from crosspool.bench.svg import HEIGHT, WIDTH, line_chart

NAMESPACE = "{http://www.w3.org/2000/svg}"


def test_every_point_lies_in_the_picture_and_names_are_escaped():
    lines = {"a<b": [(0.5, 0.0), (3000.0, 100.0)], "c": [(0.0, 5.0), (1.0, 7.0)]}
    picture = ElementTree.fromstring(line_chart("T & U", "x", "y", lines, log_x=True))
    drawn = picture.findall(f"{NAMESPACE}polyline")
    assert len(drawn) == 2
    for line in drawn:
        for pair in line.attrib["points"].split():
            across, down = map(float, pair.split(","))
            assert 0 <= across <= WIDTH
            assert 0 <= down <= HEIGHT
    assert "a<b" in [text.text for text in picture.iter(f"{NAMESPACE}text")]


def test_a_larger_value_lies_higher_and_further_right():
    picture = ElementTree.fromstring(line_chart("", "", "", {"a": [(1.0, 1.0), (5.0, 9.0)]}))
    first, last = picture.find(f"{NAMESPACE}polyline").attrib["points"].split()
    assert float(first.split(",")[0]) < float(last.split(",")[0])
    assert float(first.split(",")[1]) > float(last.split(",")[1])


def test_no_values_give_an_empty_picture():
    ElementTree.fromstring(line_chart("", "", "", {"a": []}, log_x=True))


def test_a_long_legend_has_a_row_below_the_title_and_logarithms_leave_out_what_has_none():
    lines = {f"{name} of some length": [(1.0, 0.0), (2.0, 10.0), (3.0, 1000.0)] for name in "abcd"}
    picture = ElementTree.fromstring(line_chart("A title that takes its room", "x", "y", lines, log_y=True))
    texts = {text.text: float(text.attrib["y"]) for text in picture.iter(f"{NAMESPACE}text")}
    assert texts["a of some length"] > texts["A title that takes its room"] + 10
    points = picture.find(f"{NAMESPACE}polyline").attrib["points"].split()
    assert len(points) == 2
    assert [tick for tick in texts if tick and tick.startswith("1000")]


def test_equal_factors_are_equal_steps_of_a_logarithm():
    lines = {"a": [(1.0, 10.0), (2.0, 100.0), (3.0, 1000.0)]}
    picture = ElementTree.fromstring(line_chart("", "", "", lines, log_y=True))
    points = picture.find(f"{NAMESPACE}polyline").attrib["points"].split()
    low, middle, high = (float(point.split(",")[1]) for point in points)
    assert low - middle == middle - high > 50


def test_an_axis_ends_near_its_largest_value():
    for largest, last in ((15.0, "15"), (660.0, "800"), (10.0, "10"), (0.0, "1")):
        picture = ElementTree.fromstring(line_chart("", "", "", {"a": [(0.0, 0.0), (largest, 1.0)]}))
        across = [text for text in picture.iter(f"{NAMESPACE}text") if text.attrib.get("y") == str(HEIGHT - 46 + 17)]
        assert across[-1].text == last
        assert len(across) <= 6
