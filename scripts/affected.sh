#!/usr/bin/env bash
# Prints the packages that a change affects, which are the changed ones and those whose tests
# import them, and runs their tests without virtual machines.
#
#   affected.sh [-n] [BASE]
#
# -n prints only. BASE is the commit that the work tree is compared with (default: HEAD).
set -euo pipefail
cd "$(dirname "$0")/.."

run=1
if [[ ${1:-} == -n ]]; then
    run=0
    shift
fi
base=${1:-HEAD}

# package prints the directory of the package that a file belongs to: its own, or for
# testdata and embedded files the closest one above. Documents belong to none.
package() {
    local dir
    dir=$(dirname "$1")
    while [[ $dir != . ]] && ! compgen -G "$dir/*.go" >/dev/null; do
        dir=$(dirname "$dir")
    done
    [[ $dir == . && $1 != *.go ]] || printf '%s\n' "$dir"
}

module=$(go list -m)
mapfile -t files < <(git diff --name-only "$base" -- && git ls-files --others --exclude-standard)
changed=$(for f in "${files[@]}"; do package "$f"; done | sort -u | sed -e "s|^\.\$|$module|" -e t -e "s|^|$module/|")

# A test program has all packages that its tests import, also indirectly.
mapfile -t affected < <(go list -test -f '{{if .ForTest}}{{else}}{{.ImportPath}} {{join .Deps " "}}{{end}}' ./... |
    awk -v changed="$changed" '
        BEGIN { n = split(changed, list, "\n"); for (i = 1; i <= n; i++) is[list[i]] = 1 }
        {
            name = $1; sub(/\.test$/, "", name)
            for (i = 1; i <= NF; i++) if ($i in is || (i == 1 && name in is)) { print name; next }
        }' | sort -u)
if ((!${#affected[@]})); then
    echo "no package is affected" >&2
    exit 0
fi
printf '%s\n' "${affected[@]}"
((run)) || exit 0
AGENTLAB_TEST_SEED=${AGENTLAB_TEST_SEED:-$(git rev-parse --short=7 HEAD | sed 's/^/0x/' | xargs printf '%d')} \
    exec go run ./test/run -mode check "${affected[@]}"
