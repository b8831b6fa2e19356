"""The debugger for VS Code and other editors, through the Debug Adapter Protocol.

`serve(session)` opens the door: workers are the threads of the editor's debugger. It is one more
way to the session's `Debugger`, beside the magics: what one does, the other sees.
"""

from .server import Server, serve

__all__ = ["Server", "serve"]
