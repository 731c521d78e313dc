# Sourced by scripts/jaxpt and scripts/test: makes .venv on first use (built aside, then renamed into
# place, so an interrupted build is never used) and leaves $VENV_PYTHON set.
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

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

# VENV: the environment's folder; PYTHON: the interpreter it is made from.
venv=${VENV:-$root/.venv}
stamp=$(cksum < "$root/pyproject.toml" | cut -d' ' -f1)
if [ ! -x "$venv/bin/python" ] || [ "$(cat "$venv/stamp" 2>/dev/null)" != "$stamp" ]; then
  python=$(find_python) || exit 2
  aside="$venv.building.$$"
  trap 'rm -rf "$aside"' EXIT
  trap 'exit 130' INT TERM
  say "making $venv from $python (first use, or pyproject.toml changed); this takes a minute or two"
  log="$aside/install.log"
  "$python" -m venv "$aside" || { say "python -m venv failed; on Debian: apt-get install python3-venv"; exit 2; }
  if ! "$aside/bin/python" -m pip install --quiet --disable-pip-version-check -e "$root[test]" >"$log" 2>&1; then
    tail -n 20 "$log" >&2
    say "installing the dependencies failed; what pip printed is above"
    exit 2
  fi
  # Console scripts name their interpreter by its full path: point them at the final folder.
  "$aside/bin/python" - "$aside" "$venv" <<'PYTHON'
import pathlib, sys
for path in pathlib.Path(sys.argv[1], "bin").iterdir():
    data = path.read_bytes() if path.is_file() and not path.is_symlink() else b""
    if sys.argv[1].encode() in data:
        path.write_bytes(data.replace(sys.argv[1].encode(), sys.argv[2].encode()))
PYTHON
  echo "$stamp" > "$aside/stamp"
  rm -rf "$venv.old.$$"
  [ -e "$venv" ] && mv "$venv" "$venv.old.$$"
  mv "$aside" "$venv"
  rm -rf "$venv.old.$$"
  trap - EXIT INT TERM
  say "done"
fi
VENV_PYTHON="$venv/bin/python"
