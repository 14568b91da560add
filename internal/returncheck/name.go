package returncheck

import (
	"fmt"
	"path"
	"path/filepath"
	"strings"

	"golang.org/x/text/cases"
	"golang.org/x/text/unicode/norm"
)

// MaxDepth is the maximum number of elements of a path. Each costs time.
const MaxDepth = 200

// MaxLink is the maximum length of the target of a symbolic link, in bytes.
const MaxLink = 4096

// Fold returns a form of a name that is equal for all names which a file system could
// take for the same: APFS and NTFS ignore case, APFS the forms of Unicode, and HFS+
// ignores some characters.
func Fold(name string) string {
	for i := range len(name) {
		if name[i] >= 0x80 {
			return cases.Fold().String(norm.NFD.String(strings.Map(visible, name)))
		}
	}
	return strings.ToLower(name)
}

// visible drops the characters that HFS+ ignores in names; see Apple's Technical Note
// TN1150.
func visible(r rune) rune {
	if r >= 0x200c && r <= 0x200f || r >= 0x202a && r <= 0x202e || r >= 0x206a && r <= 0x206f || r == 0xfeff {
		return -1
	}
	return r
}

// GitDir reports whether git could take a name for .git on some file system: NTFS ignores
// dots and blanks at the end, what follows a colon names a stream of the file, and git~1
// is the short name.
func GitDir(name string) bool {
	name, _, _ = strings.Cut(name, ":")
	plain := Fold(strings.TrimRight(strings.Map(visible, name), ". "))
	return plain == ".git" || plain == "git~1"
}

// BadPath returns why the path of a file of a guest is refused: it is not a clean relative
// path, or it is below .git. It returns "" for a path that is allowed.
func BadPath(p string) string {
	if p == "." || !filepath.IsLocal(p) || path.Clean(p) != p || strings.ContainsRune(p, 0) {
		return "is not a clean relative path"
	}
	if strings.Count(p, "/") >= MaxDepth {
		return "is too deep"
	}
	for part := range strings.FieldsFuncSeq(p, func(r rune) bool { return r == '/' || r == '\\' }) { // NTFS has two separators
		if part == ".." {
			return "is not a clean relative path"
		}
		if GitDir(part) {
			return "belongs to git"
		}
	}
	return ""
}

// BadLink returns why the symbolic link at a path is refused: its target is absolute,
// leads out of the root or into .git, or has .. after another name, which could be a link
// itself. It returns "" for a link that is allowed.
func BadLink(at, target string) string {
	switch {
	case target == "" || len(target) > MaxLink || strings.ContainsRune(target, 0):
		return "is a link with an invalid target"
	case path.IsAbs(target):
		return fmt.Sprintf("is a link to the absolute path %.100q", target)
	}
	down := false
	for part := range strings.SplitSeq(target, "/") {
		if part == ".." && down {
			return fmt.Sprintf("is a link with .. after another name: %.100q", target)
		}
		if GitDir(part) {
			return "is a link to git's files"
		}
		down = down || part != ".." && part != "." && part != ""
	}
	if to := path.Join(path.Dir(at), target); to != "." && !filepath.IsLocal(to) {
		return fmt.Sprintf("is a link out of the directory: %.100q", target)
	}
	return ""
}
