package regcache

import (
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/agentlab-vm/agentlab/internal/config"
)

// Only what never changes is stored: the table of rules.
func TestRules(t *testing.T) {
	s, err := New(Config{MaxBytes: 1 << 20, Cache: config.Cache{
		Dir: t.TempDir(), NPM: "https://npm.test", PyPI: "https://pypi.test/simple", PyPIFiles: []string{"files.test"}, Go: "https://go.test/proxy",
		Apt: []string{"http://mirror.test", "https://tls.test"}, Docker: "https://docker.test",
	}})
	if err != nil {
		t.Fatal(err)
	}
	sum := strings.Repeat("a", 64)
	for _, c := range []struct {
		path, url string // "": the cache does not answer
		stored    bool
	}{
		{"/cache/npm/left", "https://npm.test/left", false},
		{"/cache/npm/@scope/left", "https://npm.test/@scope%2Fleft", false},
		{"/cache/npm/left/-/left-1.0.0.tgz", "https://npm.test/left/-/left-1.0.0.tgz", true},
		{"/@scope/left/-/left-1.0.0.tgz", "https://npm.test/@scope/left/-/left-1.0.0.tgz", true},
		{"/cache/pypi/simple/left/", "https://pypi.test/simple/left/", false},
		{"/cache/pypi/files/sha256:" + sum + "/files.test:443/p/left.whl", "https://files.test:443/p/left.whl", true},
		{"/cache/pypi/files/sha256:" + sum + "/files.test:443/p/left.whl.metadata", "https://files.test:443/p/left.whl.metadata", false},
		{"/cache/pypi/files/none/pypi.test:443/p/left.whl", "https://pypi.test:443/p/left.whl", false},
		{"/cache/pypi/files/none/evil.test:443/p/left.whl", "", false},
		{"/cache/go/example.com/!left/@v/v1.2.3.mod", "https://go.test/proxy/example.com/!left/@v/v1.2.3.mod", true},
		{"/cache/go/example.com/left/@v/v2.0.0+incompatible.zip", "https://go.test/proxy/example.com/left/@v/v2.0.0+incompatible.zip", true},
		{"/cache/go/example.com/left/@v/v0.0.0-20230102150405-0123456789ab.info", "https://go.test/proxy/example.com/left/@v/v0.0.0-20230102150405-0123456789ab.info", true},
		{"/cache/go/example.com/left/@v/v1.info", "https://go.test/proxy/example.com/left/@v/v1.info", false},
		{"/cache/go/example.com/left/@v/master.info", "https://go.test/proxy/example.com/left/@v/master.info", false},
		{"/cache/go/example.com/left/@v/list", "https://go.test/proxy/example.com/left/@v/list", false},
		{"/cache/go/example.com/left/@latest", "https://go.test/proxy/example.com/left/@latest", false},
		{"/cache/go/sumdb/sum.golang.org/tile/8/0/001", "https://go.test/proxy/sumdb/sum.golang.org/tile/8/0/001", true},
		{"/cache/go/sumdb/sum.golang.org/latest", "https://go.test/proxy/sumdb/sum.golang.org/latest", false},
		{"/cache/go/sumdb/sum.golang.org/lookup/example.com/left@v1.2.3", "https://go.test/proxy/sumdb/sum.golang.org/lookup/example.com/left@v1.2.3", false},
		{"/v2/library/alpine/manifests/latest", "https://docker.test/v2/library/alpine/manifests/latest", false},
		{"/v2/library/alpine/manifests/sha256:" + sum, "https://docker.test/v2/library/alpine/manifests/sha256:" + sum, true},
		{"/v2/library/alpine/blobs/sha256:" + sum, "https://docker.test/v2/library/alpine/blobs/sha256:" + sum, true},
		{"/v2/library/alpine/blobs/sha512:" + sum, "", false},
		{"/cache/docker/v2/library/alpine/manifests/latest", "", false},
		{"/cache/apt/dists/x/InRelease", "", false},
		{"http://mirror.test/debian/dists/x/InRelease", "http://mirror.test/debian/dists/x/InRelease", false},
		{"http://mirror.test/debian/dists/x/by-hash/SHA256/" + sum, "http://mirror.test/debian/dists/x/by-hash/SHA256/" + sum, true},
		{"http://mirror.test/debian/dists/x/by-hash/SHA512/" + sum, "", false},
		{"http://mirror.test/debian/dists/x/not-by-hash/SHA256/" + sum, "http://mirror.test/debian/dists/x/not-by-hash/SHA256/" + sum, false},
		{"http://tls.test/pool/l/left_1.0_all.deb", "https://tls.test/pool/l/left_1.0_all.deb", true},
		{"http://tls.test/whirlpool/left_1.0_all.deb", "https://tls.test/whirlpool/left_1.0_all.deb", false},
	} {
		got, err := s.target(httptest.NewRequest(http.MethodGet, c.path, nil))
		switch {
		case c.url == "" && err != nil:
		case c.url == "" || err != nil:
			t.Errorf("%s: %+v %v", c.path, got, err)
		case got.url.String() != c.url || (got.key != "") != c.stored:
			t.Errorf("%s: %s, stored under %q", c.path, got.url, got.key)
		}
	}
}
