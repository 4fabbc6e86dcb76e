"""Misspelt names meet the nearest known one; entrypoints have one form."""

import pytest

from executors.names import check_entrypoint, nearest, unknown_name


def test_a_misspelt_name_is_answered_with_the_nearest_known_one():
    assert nearest("modl", ["local", "modal"]) == "modal"
    assert nearest("s4", ["s3", "file"]) == "s3"
    assert unknown_name("executor", "modl", ["local", "modal"]) == "unknown executor 'modl': did you mean 'modal'?"


def test_where_nothing_is_near_all_known_names_are_listed():
    assert unknown_name("codec", "zzzz", ["fp32", "bf16"]) == "unknown codec 'zzzz': known: bf16, fp32"
    assert unknown_name("option", "x", []) == "unknown option 'x': known: none"


@pytest.mark.parametrize("entrypoint", ["m:f", "package.module:function", "my_pkg.train:Trainer.train"])
def test_an_entrypoint_names_a_module_and_a_function(entrypoint: str):
    check_entrypoint(entrypoint)


@pytest.mark.parametrize(
    ("entrypoint", "offer"),
    [
        ("my_pkg.train.train", "'my_pkg.train:train'"),
        ("train", "'package.module:function'"),
        ("jobs/train.py", "'jobs/train.py:FUNCTION'"),
        ("my-pkg.train:train", "'package.module:function'"),
        (":train", "'package.module:function'"),
        ("m:f ", "'package.module:function'"),
    ],
)
def test_any_other_form_is_refused_with_the_right_one(entrypoint: str, offer: str):
    with pytest.raises(ValueError, match="is not of the form") as caught:
        check_entrypoint(entrypoint)
    assert str(caught.value).endswith(f"Write {offer}.")
