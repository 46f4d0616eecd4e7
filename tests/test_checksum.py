import json

import pytest

from learnable_multipliers._checksum import add_checksum, decode_line, encode_line, verify_checksum

RECORD = {"step": 3, "kind": "train", "loss": 2.25, "text": 'a "quote"}, ä', "list": [1, 0.1]}


def test_a_sealed_object_is_read_back_from_any_layout():
    for layout in ({"indent": 1}, {"sort_keys": True}, {"separators": (",", ":")}):
        fields = json.loads(json.dumps(add_checksum(RECORD), **layout))
        assert verify_checksum(fields, "file") == RECORD


@pytest.mark.parametrize("key", RECORD)
def test_a_changed_or_missing_field_raises(key):
    changed = add_checksum(RECORD) | {key: "other"}
    missing = {name: value for name, value in add_checksum(RECORD).items() if name != key}
    for fields in (changed, missing):
        with pytest.raises(ValueError, match="file was changed"):
            verify_checksum(fields, "file")


def test_an_object_without_a_checksum_raises():
    with pytest.raises(ValueError, match="file carries no sha256"):
        verify_checksum(RECORD, "file")


def test_a_sealed_line_is_json_and_read_back():
    line = encode_line(RECORD)
    assert line.count(b"\n") == 1
    assert json.loads(line).keys() == {*RECORD, "crc32"}
    assert decode_line(line) == RECORD


def test_every_flipped_bit_of_a_line_raises():
    line = encode_line(RECORD)[:-1]
    for at in range(8 * len(line)):
        flipped = bytearray(line)
        flipped[at // 8] ^= 1 << at % 8
        with pytest.raises(ValueError, match="crc32"):
            decode_line(bytes(flipped))
