package regcache

import (
	"net/url"
	"strings"

	"golang.org/x/mod/module"
	"golang.org/x/mod/semver"

	"github.com/agentlab-vm/agentlab/internal/lazyre"
)

// sumdbHost is the name of a checksum database.
var sumdbHost = lazyre.New(`^[a-z0-9.-]{1,200}$`)

// sumdbPath are the paths of a checksum database that the go command asks for.
var sumdbPath = lazyre.New(`^(supported|latest|lookup/[^?#]{1,600}|tile/[0-9]{1,2}/[a-z0-9/.]{1,100})$`)

// goTarget reads a path of the protocol of Go proxies: MODULE/@v/list,
// MODULE/@v/VERSION.EXT, MODULE/@latest and sumdb/HOST/PATH.
func (s *Service) goTarget(rest string) (*target, error) {
	base := s.cfg.Upstreams.Go
	if base == nil {
		return nil, errNoObject
	}
	if db, ok := strings.CutPrefix(rest, "sumdb/"); ok {
		return s.sumdbTarget(base, db)
	}
	mod, version, ok := strings.Cut(rest, "/@")
	if !ok {
		return nil, errNoObject
	}
	if _, err := module.UnescapePath(mod); err != nil {
		return nil, errNoObject
	}
	t := &target{kind: Go, url: base.JoinPath(rest), index: true}
	t.key = t.url.String()
	file, isFile := strings.CutPrefix(version, "v/")
	if version == "latest" || file == "list" && isFile {
		return t, nil
	}
	dot := strings.LastIndexByte(file, '.')
	if !isFile || dot < 0 || strings.Contains(file, "/") {
		return nil, errNoObject
	}
	v, err := module.UnescapeVersion(file[:dot])
	if err != nil {
		return nil, errNoObject
	}
	switch file[dot:] {
	case ".info", ".mod", ".zip":
	default:
		return nil, errNoObject
	}
	canonical := semver.Canonical(v) != "" && strings.TrimSuffix(v, "+incompatible") == semver.Canonical(v)
	t.index = !canonical // a branch or a prefix of a version, whose commit changes
	return t, nil
}

// sumdbTarget reads the path of a checksum database. As without the cache, the
// Go proxy passes it on; its answers are signed, and the go command verifies them.
func (s *Service) sumdbTarget(base *url.URL, rest string) (*target, error) {
	host, file, _ := strings.Cut(rest, "/")
	if !sumdbHost.MatchString(host) || !sumdbPath.MatchString(file) {
		return nil, errNoObject
	}
	u := base.JoinPath("sumdb", host, file)
	return &target{kind: Go, key: u.String(), url: u, index: !strings.HasPrefix(file, "tile/")}, nil
}
