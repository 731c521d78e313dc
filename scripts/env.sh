# Sourced by scripts/jaxpt and scripts/test. `ensure_venv FOLDER EXTRAS WORDS` makes an environment on first use
# (built aside, then renamed into place, so an interrupted build is never used) and leaves $VENV_PYTHON set.
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# VENV: the core environment's folder (the peers' is $VENV-peers); PYTHON: the interpreter they are made from.
venv=${VENV:-$root/.venv}

say() { printf 'jaxpt: %s\n' "$*" >&2; }

find_python() {
  local candidate
  for candidate in ${PYTHON:-python3 python3.13 python3.12 python3.11}; do
    if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      command -v "$candidate"; return
    fi
  done
  say "no Python >= 3.11 found (tried: ${PYTHON:-python3 python3.13 python3.12 python3.11}); set PYTHON=/path/to/python3"
  exit 2
}

# What an environment is made from: pyproject.toml without the extras and tools' settings that it does not use.
stamp_of() {
  "$1" - "$root/pyproject.toml" "$2" <<'PYTHON'
import sys, tomllib, zlib
with open(sys.argv[1], "rb") as file:
    data = tomllib.load(file)
extras = data["project"].pop("optional-dependencies")
chosen = {name: extras[name] for name in sys.argv[2].split(",")}
print(zlib.crc32(repr((data["project"], chosen, data["tool"]["setuptools"])).encode()))
PYTHON
}

ensure_venv() {
  local folder=$1 extras=$2 words=$3 python
  VENV_PYTHON="$folder/bin/python"
  if [ -x "$VENV_PYTHON" ] && [ "$(cat "$folder/stamp" 2>/dev/null)" = "$(stamp_of "$VENV_PYTHON" "$extras")" ]; then
    return
  fi
  python=$(find_python) || exit 2
  aside="$folder.building.$$" old="$folder.old.$$" # global: the trap reads them
  trap 'rm -rf "$aside" "$old"' EXIT
  trap 'exit 130' INT TERM
  say "making $folder from $python (first use, or its requirements changed); this takes $words"
  "$python" -m venv "$aside" || { say "python -m venv failed; on Debian: apt-get install python3-venv"; exit 2; }
  if ! "$aside/bin/python" -m pip install --quiet --disable-pip-version-check -e "$root[$extras]" \
    >"$aside/install.log" 2>&1; then
    tail -n 20 "$aside/install.log" >&2
    say "installing the dependencies failed; what pip printed is above"
    exit 2
  fi
  # Console scripts name their interpreter by its full path: point them at the final folder.
  "$aside/bin/python" - "$aside" "$folder" <<'PYTHON'
import pathlib, sys
for path in pathlib.Path(sys.argv[1], "bin").iterdir():
    data = path.read_bytes() if path.is_file() and not path.is_symlink() else b""
    if sys.argv[1].encode() in data:
        path.write_bytes(data.replace(sys.argv[1].encode(), sys.argv[2].encode()))
PYTHON
  stamp_of "$aside/bin/python" "$extras" > "$aside/stamp"
  if [ -e "$folder" ]; then mv "$folder" "$old"; fi
  mv "$aside" "$folder"
  rm -rf "$old"
  trap - EXIT INT TERM
  say "done"
}

# FOLDER/wheels: the Python files of the wheels that pyproject.toml names in tool.jaxpt, for tests that load single ones
# by path. One build of each wheel serves every Python and machine, because nothing of it is compiled here.
ensure_wheels() {
  local folder=$1/wheels wanted
  wanted=$("$VENV_PYTHON" -c 'import sys, tomllib; print(*tomllib.load(open(sys.argv[1], "rb"))["tool"]["jaxpt"]["peer-wheels"])' \
    "$root/pyproject.toml")
  if [ "$(cat "$folder/stamp" 2>/dev/null)" = "$wanted" ]; then return; fi
  aside="$folder.building.$$"
  trap 'rm -rf "$aside"' EXIT
  trap 'exit 130' INT TERM
  say "fetching files of $wanted"
  mkdir -p "$aside"
  # shellcheck disable=SC2086 # one word a wheel
  if ! "$VENV_PYTHON" -m pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all: \
    --ignore-requires-python --python-version 3.11 --implementation cp --platform manylinux1_x86_64 \
    --dest "$aside" $wanted >"$aside/download.log" 2>&1; then
    tail -n 20 "$aside/download.log" >&2
    say "fetching failed; what pip printed is above"
    exit 2
  fi
  "$VENV_PYTHON" - "$aside" $wanted <<'PYTHON'
import pathlib, sys, zipfile
folder, packages = pathlib.Path(sys.argv[1]), [name.split("==")[0] for name in sys.argv[2:]]
for path in folder.glob("*.whl"):
    with zipfile.ZipFile(path) as wheel:
        for name in wheel.namelist():
            inside = name.split(".data/purelib/")[-1]  # where some wheels keep their Python files
            if inside.split("/")[0] in packages and inside.endswith(".py"):
                (folder / inside).parent.mkdir(parents=True, exist_ok=True)
                (folder / inside).write_bytes(wheel.read(name))
    path.unlink()
PYTHON
  echo "$wanted" > "$aside/stamp"
  rm -rf "$folder"
  mv "$aside" "$folder"
  trap - EXIT INT TERM
}
