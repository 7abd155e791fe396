"""Packaging of unitrain: `pip install .` for users, `pip install -e ".[dev]"` for its developers."""

import os
import re
from pathlib import Path

from setuptools import find_packages, setup

here = Path(__file__).parent
version = re.search(r'__version__ = "(.+)"', (here / "unitrain" / "__init__.py").read_text())
assert version, "unitrain/__init__.py states the version"

compatibility = (here / "unitrain" / "torch_compat.py").read_text()
minimum_torch, first_untested_torch = re.findall(r'^(?:MINIMUM|FIRST_UNTESTED)_TORCH = "(.+?)"', compatibility, re.M)

examples = ["scikit-learn>=1.3", "torchvision"]
# Horovod is not listed, because no release builds against a current torch: `unitrain horovod build` installs it.
horovod = ["cloudpickle>=2.0", "cmake>=3.18", "packaging>=21", "psutil>=5.9", "pyyaml>=6.0", "setuptools", "wheel"]
# 4.53 is the first version with the argument `instantiators` of ArgumentParser.instantiate.
config = ["jsonargparse[ruamel,signatures]>=4.53,<5"]
migrate = ["libcst>=1.8"]
torchmetrics = ["torchmetrics>=1.4"]
data = ["datasets>=5.0", "torchdata>=0.11"]
huggingface = ["datasets>=5.0", "tokenizers>=0.22", "transformers>=5.0"]
report = ["jinja2>=3.1", "matplotlib>=3.8"]
prometheus = ["prometheus_client>=0.21"]
tensorboard = ["pillow>=10.0", "tensorboard>=2.14"]
wandb = ["pillow>=10.0", "wandb>=0.17"]
mlflow = ["alembic>=1.10", "mlflow-skinny>=2.14", "pillow>=10.0", "sqlalchemy>=2.0"]  # with an SQLite database
loggers = [*tensorboard, *wandb, *mlflow]
notebook = ["ipykernel>=6.20", "nbclient>=0.8"]  # the tests execute a notebook
# Not part of dev: flytekit requires python-dateutil<3, and constraints.txt has a later version.
flyte = ["flytekit>=1.16"]
# For benchmarks/peers.py, which reports missing libraries.
peers = ["accelerate>=1.0", "lightning>=2.4", "pytorch-ignite>=0.5"]
# Schemas of Kubernetes and Kubeflow, with which the tests validate manifests.
manifests = ["jsonschema>=4.20", "kubeflow-trainer-api>=2.1", "kubernetes-validate>=1.33"]
# The reasons for Sphinx are in CONTRIBUTING.md.
docs = ["furo>=2025.12", "myst-parser>=5.0", "sphinx>=9.0", "sphinx-click>=6.2"]
# For the tests with other versions of Python and torch (make test-torch).
test = [
    "expecttest>=0.2", "hypothesis>=6.100", "pytest>=8.0", "pytest-timeout>=2.3", "pytest-xdist>=3.6",
    *horovod, *examples,
]  # fmt: skip
dev = ["import-linter>=2.6", "mypy>=1.10", "ruff>=0.6"]

# Address of the published repository, such as https://github.com/OWNER/unitrain. Set it when you build a release.
repository = os.environ.get("UNITRAIN_REPOSITORY_URL")  # noqa: TID251


def description() -> str:
    """Return the README with absolute links, or without relative links if the address of the repository is unknown."""
    target = rf"[\1]({repository}/blob/main/\2)" if repository else r"\1"
    return re.sub(r"\[([^\]]+)\]\((?!http)([^)]+)\)", target, (here / "README.md").read_text())


setup(
    name="unitrain",
    version=version.group(1),
    description="Run one PyTorch training script on DDP or Horovod, under any launcher, with the same results",
    long_description=description(),
    long_description_content_type="text/markdown",
    author="The unitrain authors",
    license="Apache-2.0",
    license_files=["LICENSE"],
    keywords="pytorch distributed training ddp horovod mpi slurm nccl gloo allreduce",
    classifiers=[
        "Development Status :: 4 - Beta",
        "Environment :: Console",
        "Environment :: GPU :: NVIDIA CUDA",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3 :: Only",
        *(f"Programming Language :: Python :: 3.{minor}" for minor in range(10, 15)),
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Topic :: System :: Distributed Computing",
        "Typing :: Typed",
    ],
    project_urls={
        "Source": repository,
        "Documentation": f"{repository}/tree/main/docs",
        "Changelog": f"{repository}/blob/main/CHANGELOG.md",
        "Issues": f"{repository}/issues",
    }
    if repository
    else {},
    python_requires=">=3.10",
    packages=find_packages(include=["unitrain", "unitrain.*"]),
    # With this entry, an editable install adds the clone to sys.path. Otherwise, in the folder that contains the clone,
    # Python would import the clone, a folder named unitrain, as a namespace package.
    package_dir={"": "."},
    package_data={"unitrain": ["py.typed", "report/*.html", "horovod_wheel/patches/*.patch"]},
    install_requires=[
        "click>=8.1",
        "cloudpickle>=2.0",
        "numpy>=1.26",
        "pyyaml>=6.0",
        "rich>=13.0",
        "safetensors>=0.4",
        f"torch>={minimum_torch}.0a0,<{first_untested_torch}",  # a0: vendors' builds, such as 2.6.0a0+ecf3bae40a
        "typing_extensions>=4.8",
    ],
    extras_require={
        "horovod": horovod,
        "examples": examples,
        "config": config,
        "migrate": migrate,
        "torchmetrics": torchmetrics,
        "data": data,
        "huggingface": huggingface,
        "tensorboard": tensorboard,
        "wandb": wandb,
        "mlflow": mlflow,
        "loggers": loggers,
        "prometheus": prometheus,
        "report": report,
        "flyte": flyte,
        "peers": peers,
        "docs": docs,
        "test": test,
        "dev": [
            *dev,
            *test,
            *docs,
            *manifests,
            *config,
            *migrate,
            *data,
            *huggingface,
            *torchmetrics,
            *prometheus,
            *report,
            *loggers,
            *notebook,
        ],
    },
    entry_points={"console_scripts": ["unitrain = unitrain.cli:unitrain"]},
)
