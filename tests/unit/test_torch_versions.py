"""The supported versions of torch, and the features that some of them lack."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import unitrain
from unitrain import torch_compat
from unitrain.errors import MissingFeatureError, UnsupportedError

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("version", ["2.5.1", "2.16.0", "2.16.0a0+abc", "3.0"])
def test_init_rejects_versions_that_are_not_supported(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    with pytest.raises(UnsupportedError, match=rf"torch {re.escape(version)} is installed.*>= 2\.6 and < 2\.16"):
        unitrain.init("local")


@pytest.mark.parametrize("version", ["2.6.0", "2.6.0a0+ecf3bae40a", "2.14.1+cu130", "2.15.0"])
def test_supported_versions_and_their_prereleases_are_accepted(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    torch_compat.check_torch()


@pytest.mark.parametrize("feature", torch_compat.FIRST_TORCH)
def test_error_of_a_missing_feature_names_the_required_version(feature: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.8.0")
    version = torch_compat.FIRST_TORCH[feature]
    with pytest.raises(
        MissingFeatureError, match=re.escape(f"{feature} requires torch {version} or later; installed: ")
    ):
        torch_compat.require_torch(feature)
    monkeypatch.setattr(torch, "__version__", f"{version}.0")
    torch_compat.require_torch(feature)


def test_documentation_lists_the_features_and_versions() -> None:
    page = (ROOT / "docs" / "reference" / "torch_versions.md").read_text()
    rows = {
        feature.replace("`", ""): version for feature, version in re.findall(r"^\| (.+) \| ([\d.]+) \|$", page, re.M)
    }
    assert rows == torch_compat.FIRST_TORCH
    assert "torch 2.6 to 2.15" in page
