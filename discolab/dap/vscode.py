"""The extension for VS Code: it makes the debugger's type known, and has no code.

VS Code attaches to a ``debugServer`` by itself, but only with a type that an extension names.
"""

from __future__ import annotations

import json
import os
import zipfile
from pathlib import Path
from typing import Any

from ..runtime.errors import DiscoError

_VERSION = "0.1.0"
_MANIFEST: dict[str, Any] = {
    "name": "discolab-debug",
    "displayName": "discolab",
    "description": "Steps through sharded torch programs: attaches to a session of discolab.",
    "publisher": "discolab",
    "version": _VERSION,
    "license": "Apache-2.0",
    "engines": {"vscode": "^1.80.0"},
    "categories": ["Debuggers"],
    "contributes": {
        "breakpoints": [{"language": "python"}],
        "debuggers": [
            {
                "type": "discolab",
                "label": "discolab",
                "languages": ["python"],
                "configurationAttributes": {
                    "attach": {
                        "required": ["debugServer", "token"],
                        "properties": {
                            "debugServer": {
                                "type": "number",
                                "description": "The port, as `discolab dap` prints it.",
                            },
                            "token": {
                                "type": "string",
                                "description": "The token, as `discolab dap` prints it.",
                            },
                            "stepAll": {
                                "type": "boolean",
                                "default": True,
                                "description": "Whether every cell can be paused.",
                            },
                        },
                    }
                },
            }
        ],
    },
}
_TYPES = (
    '<?xml version="1.0" encoding="utf-8"?>'
    '<Types xmlns="http://schemas.openxmlformats.org/package/2006/content-types">'
    '<Default Extension="json" ContentType="application/json"/>'
    '<Default Extension="vsixmanifest" ContentType="text/xml"/></Types>'
)
_PACKAGE = (
    '<?xml version="1.0" encoding="utf-8"?>'
    '<PackageManifest Version="2.0.0" xmlns="http://schemas.microsoft.com/developer/vsx-schema/2011">'
    f'<Metadata><Identity Language="en-US" Id="discolab-debug" Version="{_VERSION}" '
    'Publisher="discolab"/><DisplayName>discolab</DisplayName>'
    "<Description>Steps through sharded torch programs.</Description></Metadata>"
    '<Installation><InstallationTarget Id="Microsoft.VisualStudio.Code"/></Installation>'
    "<Dependencies/><Assets>"
    '<Asset Type="Microsoft.VisualStudio.Code.Manifest" Path="extension/package.json" '
    'Addressable="true"/></Assets></PackageManifest>'
)


def write_extension(path: str | os.PathLike[str]) -> Path:
    """Write the extension as a ``.vsix`` file; its path.

    Raises
    ------
    DiscoError
        If it can't be written.
    """
    file = Path(path).expanduser()
    try:
        with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("[Content_Types].xml", _TYPES)
            archive.writestr("extension.vsixmanifest", _PACKAGE)
            archive.writestr("extension/package.json", json.dumps(_MANIFEST, indent=2))
    except OSError as exc:
        raise DiscoError(f"the extension can't be written to {file}: {exc.strerror}") from None
    return file
