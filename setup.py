"""What a wheel ships: the library `rlsys`, and the Ray actors as `rlsys_actors`.

In the checkout that folder is called `actors`, which is too common a name to install; its modules
import each other relatively, so that they run under either.
"""

from setuptools import find_packages, setup

setup(
    packages=[*find_packages(include=["rlsys", "rlsys.*"]), "rlsys_actors"],
    package_dir={"rlsys_actors": "actors"},
    package_data={"rlsys": ["py.typed"]},
)
