"""`python -m jaxsgl`: the same as the command `jaxsgl`."""

from jaxsgl.commands import run

if __name__ == "__main__":
    run()
