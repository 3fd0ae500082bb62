"""What a wheel ships: the library `rlsys`, and the Ray actors as `rlsys_actors`.

In the checkout that folder is called `actors`, which is too common a name to install; its modules
import each other relatively, so that they run under either.

`pip install -e` puts the checkout on the path, so that actors/ and recipes/ can be imported.
"""

from setuptools import find_packages, setup
from setuptools.command.editable_wheel import editable_wheel


class EditableCheckout(editable_wheel):
    """An editable installation whose default mode is "compat": the checkout is on the path."""

    def finalize_options(self) -> None:
        """Set the mode, unless --config-settings did."""
        self.mode = self.mode or "compat"
        super().finalize_options()


ACTORS = [name.replace("actors", "rlsys_actors", 1) for name in find_packages(include=["actors*"])]

setup(
    cmdclass={"editable_wheel": EditableCheckout},
    packages=[*find_packages(include=["rlsys", "rlsys.*"]), *ACTORS],
    package_dir={"rlsys_actors": "actors"},
    package_data={
        "rlsys": ["py.typed"],
        "rlsys.commands": ["project/*.template"],
        "rlsys.planner": ["data/*"],
        "rlsys.report": ["assets/*"],
    },
)
