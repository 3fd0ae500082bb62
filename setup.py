"""What a wheel ships: the library `rlsys`, and the Ray actors as `rlsys_actors`.

In the checkout that folder is called `actors`, which is too common a name to install; its modules
import each other relatively, so that they run under either.
"""

from setuptools import find_packages, setup

ACTORS = [name.replace("actors", "rlsys_actors", 1) for name in find_packages(include=["actors*"])]

setup(
    packages=[*find_packages(include=["rlsys", "rlsys.*"]), *ACTORS],
    package_dir={"rlsys_actors": "actors"},
    package_data={"rlsys": ["py.typed"], "rlsys.commands": ["project/*.template"]},
)
