"""Which versions of vLLM are let in."""

import pytest

from specpaged.vllm_plugin.compat import OVERRIDE, TESTED, check_version


@pytest.mark.parametrize("version", [TESTED, "0.33.2+cpu", "0.32.1rc1"])
def test_supported_versions_pass(version):
    check_version(version, {})


@pytest.mark.parametrize("version", ["0.31.4", "0.34.0", "1.0.0", "dev"])
def test_others_are_refused_with_what_is_supported_and_how_to_override(version):
    with pytest.raises(RuntimeError, match=rf"supports vLLM 0.32 to 0.33 .* this is {version}; .* set {OVERRIDE}=1"):
        check_version(version, {})
    check_version(version, {OVERRIDE: "1"})
