#!/bin/bash
# stats.sh [TREE]: lines by area, file and function statistics, import graph,
# callbacks between services, files on the path of 'job run'. Reads tracked
# files only; the same rules before and after. Needs git, awk, go (go list).
#   product  .go that is no test and no test double, in its area
#   double   test doubles and test-only programs, in any directory
#   test     *_test.go
#   other    shell, SQL, YAML, C, testscripts (listed only)
# shellcheck disable=SC2016 # awk and go templates, not shell
set -eu
cd "${1:-.}"
MOD=$(awk '$1=="module"{print $2;exit}' go.mod)
# A directory is a double if its path contains one of these names. Names after the
# redesign belong here too, so that a move changes no number. Only drivers and
# servers that exist for tests; probe/prober/verify are product.
DOUBLE='(^|/)(test|tests|testnode|archtest|backendtest|[a-z]*test|fake|fake[a-z]+|fault|faults|toy)(/|$)'
tracked() { git ls-files -- "$@" | while read -r f; do [ -f "$f" ] && echo "$f"; done; }
kind() { # path on stdin -> "kind path"
  awk -v D="$DOUBLE" '{ d=$0; if (!sub(/\/[^\/]*$/, "", d)) d="."
    if ($0 ~ /_test\.go$/) k="test"; else if (d ~ D || $0 ~ /_(fault|testonly|faults)\.go$/) k="double"; else k="product"
    print k, $0 }'
}
T=$(mktemp -d); trap 'rm -rf "$T"' EXIT
tracked '*.go' | kind > "$T/kinds"

# One pass: per file lines, code, comment, blank; per function its length.
awk '{print $2}' "$T/kinds" | tr '\n' '\0' | xargs -0 awk '
  function close_() { if (f != "") print "F", f, n, code, com, bl }
  FNR==1 { close_(); f=FILENAME; n=code=com=bl=0; inb=0; infn=0 }
  { n++ }
  inb { com++; if ($0 ~ /\*\//) inb=0; next }
  /^[ \t]*$/ { bl++; if (infn) fl++; next }
  /^[ \t]*\/\// { com++; if (infn) fl++; next }
  /^[ \t]*\/\*/ && $0 !~ /\*\// { com++; inb=1; next }
  { code++ }
  /^func / { name=$0; infn=1; fl=0; if ($0 ~ /}[ \t]*$/ && $0 !~ /{[ \t]*$/) { print "U", f, 1; infn=0 } next }
  infn && /^}/ { print "U", f, fl; infn=0; next }
  infn { fl++ }
  END { close_() }' > "$T/raw"

awk -v kinds="$T/kinds" -v OUT="$T" '
  BEGIN { while ((getline l < kinds) > 0) { split(l, w, " "); k[w[2]]=w[1] } }
  function area(f,   p,n,a) { n=split(f,p,"/"); if (n==1) return "(root)"
    if (p[1]=="internal") { if ((p[2]=="backend"||p[2]=="egress"||p[2]=="guest") && n>3) { a=p[1]"/"p[2]"/"p[3]
        if (p[2]=="backend" && n>4) a=a"/"p[4]; return a } return p[1]"/"p[2] }
    if (p[1]=="cmd"||p[1]=="test") return p[1]; return p[1] }
  $1=="F" { K=k[$2]; a=area($2); L[K]+=$3; N[K]++; C[K]+=$4; M[K]+=$5; B[K]+=$6
            AL[a,K]+=$3; AN[a,K]++; AC[a,K]+=$4; AM[a,K]+=$5; as[a]=1; print K, $3 > (OUT "/files") }
  $1=="U" { K=k[$2]; print K, $3 > (OUT "/funcs") }
  END {
    printf "== total (Go)\n%-8s %8s %8s %8s %8s %6s\n","kind","lines","code","comment","blank","files"
    split("product double test",o," "); for(i=1;i<=3;i++) printf "%-8s %8d %8d %8d %8d %6d\n",o[i],L[o[i]],C[o[i]],M[o[i]],B[o[i]],N[o[i]]
    printf "\n== by area: lines\n%-34s %8s %8s %8s %6s %8s %8s\n","area","product","code","comment","files","double","test"
    for (a in as) printf "%-34s %8d %8d %8d %6d %8d %8d\n",a,AL[a,"product"],AC[a,"product"],AM[a,"product"],AN[a,"product"],AL[a,"double"],AL[a,"test"] | "sort -k2,2nr -k1,1"
    close("sort -k2,2nr -k1,1") }' "$T/raw"

stat() { # KIND FILE LABEL
  awk -v K="$1" '$1==K{print $2}' "$2" | sort -n | awk -v l="$3" '{v[NR]=$1;s+=$1}
    END{printf "%-20s n=%d mean=%.1f median=%d p90=%d p99=%d max=%d\n",l,NR,s/NR,v[int((NR+1)/2)],v[int(NR*.9)],v[int(NR*.99)],v[NR]}'
}
echo; echo "== sizes (lines; functions without signature and closing brace)"
for K in product double test; do stat $K "$T/files" "$K files"; stat $K "$T/funcs" "$K functions"; done

echo; echo "== other tracked text (lines)"
for e in sh sql c h S yaml yml txtar md txt service conf html css js; do
  n=$(tracked "*.$e" | grep -v -E '(^|/)testdata/' | tr '\n' '\0' | xargs -0r cat | wc -l)
  if [ "$n" -gt 0 ]; then printf '%-8s %8d\n' "$e" "$n"; fi
done

echo; echo "== import graph (non-test imports inside the module)"
go list -f '{{$p := .ImportPath}}{{range .Imports}}{{$p}} {{.}}{{"\n"}}{{end}}' ./... 2>/dev/null |
  awk -v m="$MOD" '$2 ~ "^" m { sub("^" m "/?","",$1); sub("^" m "/?","",$2); if($1=="")$1="(root)"; if($2=="")$2="(root)"; print $1, $2 }' |
  awk -v D="$DOUBLE" '$1 !~ D' | sort -u > "$T/edges"
awk '{o[$1]++; i[$2]++; n[$1]; n[$2]; e++} END{printf "packages=%d edges=%d\n",length(n),e
  for (p in n) printf "%-36s imports=%d imported_by=%d\n",p,o[p],i[p] | "sort"}' "$T/edges"
echo "-- edges among services, daemon, server"
awk '$1 ~ /^internal\/(job|sandbox|gc|artifact|audit|verify|daemon|server|guestplane|cli|session|workspace|bootstrap|recovery|doctor)$/ {d[$1]=d[$1] " " $2} END{for(p in d) print p " ->" d[p] | "sort"}' "$T/edges"
echo "-- doubles that the product imports (must be none but the fake's registration)"
awk -v D="$DOUBLE" '$2 ~ D' "$T/edges"

echo; echo "== function-typed fields and setters of services (callbacks; clocks, random sources and loggers excluded)"
for p in job sandbox bootstrap gc artifact audit verify doctor recovery guestplane; do
  [ -d internal/$p ] || continue
  tracked "internal/$p/*.go" | grep -v _test.go | tr '\n' '\0' | xargs -0r awk '
    /^type [A-Za-z]+ (struct|interface) \{/ {t=$2; s=($3=="struct")} /^}/ {t=""}
    t!="" && s && /^\t[A-Za-z]+(, [A-Za-z]+)* +func\(/ && $0 !~ /^\t(now|Now|clock|Clock|rand|Rand|random|newID|sleep|cancel|stop)/ { sub(/^\t/,""); print FILENAME ": " t "." $0 }'
done

LIST=${JOBRUN:-}
if [ -z "$LIST" ] && grep -q 'job run.*file by file' docs/architecture.md 2>/dev/null; then
  LIST=$T/list; awk '/^## .*file by file/{on=1;next} /^## /{on=0} on' docs/architecture.md | sed -nE 's/^[0-9]+\. `([A-Za-z0-9_./-]+\.(go|service|sh))`.*/\1/p' > "$LIST"
fi
if [ -n "$LIST" ]; then
  echo; echo "== files on the path of job run ($LIST)"
  while read -r f; do [ -f "$f" ] || echo "missing: $f"; done < <(grep -oE '[A-Za-z0-9_./-]+\.(go|service|sh)' "$LIST" | awk '!s[$0]++')
  grep -oE '[A-Za-z0-9_./-]+\.(go|service|sh)' "$LIST" | awk '!s[$0]++' > "$T/path"
  printf 'files=%d lines=%d packages=%d\n' "$(wc -l < "$T/path")" "$(tr '\n' '\0' < "$T/path" | xargs -0 cat 2>/dev/null | wc -l)" "$(sed 's,/[^/]*$,,' "$T/path" | sort -u | wc -l)"
fi
