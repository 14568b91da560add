#!/usr/bin/env bash
# Runs every fuzz target of the module, one after the other, each for an equal
# part of a total time.
#
#   FUZZTOTAL   seconds for all targets together (default 600)
#   FUZZTIME    seconds for each target instead, when set
#   FUZZONLY    regular expression: only targets whose "package Name" match
#   FUZZKEEP    after each target, keep at most so many of the inputs that
#               reached new code, the shortest first, in testdata/fuzz (default 0)
#
# A failing input is written to testdata/fuzz by the go tool, and every later
# 'go test' runs it. The corpus is stored in .cache/fuzz between runs.
set -euo pipefail
if (($# > 0)); then
  sed -n '2,/^[^#]/s/^#\( \|$\)//p' "$0" >&2
  exit 2
fi
cd "$(dirname "$0")/.."

total=${FUZZTOTAL:-600}
keep=${FUZZKEEP:-0}
cache=$PWD/.cache/fuzz
bins=$(mktemp -d)
trap 'rm -rf "$bins"' EXIT
mkdir -p "$cache"

targets=()
while read -r pkg dir; do
  while read -r name; do
    [[ -z ${FUZZONLY:-} || "$pkg $name" =~ $FUZZONLY ]] && targets+=("$pkg $dir $name")
  done < <(grep -hoE '^func Fuzz[A-Za-z0-9_]+' "$dir"/*_test.go 2>/dev/null | sed 's/^func //' | sort -u)
done < <(go list -f '{{.ImportPath}} {{.Dir}}' ./...)
if ((${#targets[@]} == 0)); then
  echo "fuzz: no targets found" >&2
  exit 2
fi
each=${FUZZTIME:-$((total / ${#targets[@]}))}
each=${each%s}
((each > 0)) || each=1
echo "fuzz: ${#targets[@]} targets, $each s each"

# Build first, so that compiling does not use the time for fuzzing.
for t in "${targets[@]}"; do
  read -r pkg _ _ <<<"$t"
  bin=$bins/${pkg//\//_}
  [[ -x $bin ]] || go test -c -fuzz=. -o "$bin" "$pkg"
done

keep_inputs() { # directory of the package, target, cache of its package
  local to=$1/testdata/fuzz/$2 from=$3/$2
  [[ -d $from ]] || return 0
  mkdir -p "$to"
  find "$from" -type f -size -8k -printf '%s %p\n' | sort -n | sed -n "1,${keep}p" | while read -r _ file; do
    cp -n "$file" "$to/"
  done
}

began=$(date +%s)
failed=()
for t in "${targets[@]}"; do
  read -r pkg dir name <<<"$t"
  own=$cache/${pkg//\//_}
  mkdir -p "$own"
  echo "== ${pkg#*/agentlab/} $name"
  (cd "$dir" && "$bins/${pkg//\//_}" -test.run='^$' -test.fuzz="^$name\$" -test.fuzztime="${each}s" \
    -test.fuzzminimizetime=3s -test.fuzzcachedir="$own" 2>&1 | tail -n 15) || failed+=("${pkg#*/agentlab/} $name")
  ((keep == 0)) || keep_inputs "$dir" "$name" "$own"
done
echo "fuzz: ${#targets[@]} targets in $(($(date +%s) - began)) s, ${#failed[@]} with findings"
for f in "${failed[@]}"; do echo "  $f" >&2; done
((${#failed[@]} == 0))
