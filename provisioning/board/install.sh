#!/bin/sh
# Makes this board ready for edgefl from the payload in FOLDER: sh install.sh FOLDER
set -eu
