from pathlib import Path

from setuptools import find_packages, setup

# kernels/ is a source root, not a package: a top-level `kernels` would shadow a library that transformers probes for.
setup(
    name="specpaged",
    version="0.1.0",
    description="Batch speculative decoding on paged KV that cannot be told from plain decoding",
    long_description=Path("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=[*find_packages(include=["specpaged", "specpaged.*"]), "specpaged_kernels", "specpaged_kernels.cpu"],
    package_dir={"": ".", "specpaged_kernels": "kernels/specpaged_kernels"},
    package_data={
        "specpaged_kernels.cpu": ["*.cpp", "*.h"],
        "specpaged": ["assets/*.md", "assets/*.jsonl", "assets/target/*", "assets/draft/*"],
    },
    install_requires=[
        "torch>=2.10",
        "triton>=3.5; platform_system == 'Linux'",
        "transformers>=5.10,<6",
        "tokenizers",
        "safetensors",
        "numpy",
        "tqdm",
        "typer",
        "rich",
        "typing_extensions",
    ],
    extras_require={
        "xformers": ["xformers>=0.0.35"],
        "vllm": ["vllm>=0.32,<0.34"],
        "bench": ["pytest-benchmark", "matplotlib", "psutil"],
        "dev": [
            *("pytest", "pytest-benchmark", "pytest-timeout", "pytest-xdist"),
            *("hypothesis", "matplotlib", "psutil", "ruff"),
        ],
    },
    entry_points={
        "console_scripts": ["specpaged = specpaged.cli:app"],
        "vllm.general_plugins": ["specpaged = specpaged.vllm_plugin:register"],
    },
)
