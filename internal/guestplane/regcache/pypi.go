package regcache

import (
	"bytes"
	"encoding/json"
	"io"
	"net"
	"net/http"
	"net/url"
	"path"
	"slices"
	"strings"

	"golang.org/x/net/html"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/guestapi"
	"github.com/agentlab-vm/agentlab/internal/lazyre"
)

const pypiJSON = "application/vnd.pypi.simple.v1+json"

var (
	pypiProject = lazyre.New(`^simple/([A-Za-z0-9](?:[A-Za-z0-9._-]{0,200}[A-Za-z0-9])?)/?$`)
	pypiFile    = lazyre.New(`^files/(sha256:[0-9a-f]{64}|none)/([A-Za-z0-9.:-]{1,260})(/[^?#]+)$`)
)

// pypiTarget reads simple/PROJECT/ and files/DIGEST/HOST/PATH, which the index has
// instead of the URLs of files.
func (s *Service) pypiTarget(r *http.Request, rest string) (*target, error) {
	base := s.cfg.Upstreams.PyPI
	if base == nil {
		return nil, errNoObject
	}
	if m := pypiProject.FindStringSubmatch(rest); m != nil {
		t := &target{kind: PyPI, url: base.JoinPath(m[1]), index: true, accept: "text/html"}
		t.url.Path += "/"
		if strings.Contains(r.Header.Get("Accept"), pypiJSON) {
			t.accept = pypiJSON + ", text/html;q=0.1"
		}
		t.key = t.accept + " " + t.url.String()
		t.rewrite = func(body []byte, contentType string) ([]byte, string, error) {
			return s.rewriteIndex(t.url, body, contentType)
		}
		return t, nil
	}
	m := pypiFile.FindStringSubmatch(rest)
	if m == nil || !slices.Contains(s.pypiHosts(), m[2]) {
		return nil, errNoObject
	}
	u := &url.URL{Scheme: base.Scheme, Host: m[2], Path: m[3]}
	t := &target{kind: PyPI, url: u, index: true, key: u.String()}
	if d, ok := parseDigest(m[1]); ok && !strings.HasSuffix(m[3], ".metadata") { // whose digest is another one
		t.digest, t.index, t.key = d, false, d.String()
	}
	return t, nil
}

// pypiHosts returns the HOST:PORT of the servers whose files are cached.
func (s *Service) pypiHosts() []string {
	out := []string{hostPort(s.cfg.Upstreams.PyPI)}
	for _, h := range s.cfg.Upstreams.PyPIFiles {
		if _, _, err := net.SplitHostPort(h); err != nil {
			h = hostPort(&url.URL{Scheme: s.cfg.Upstreams.PyPI.Scheme, Host: h})
		}
		out = append(out, h)
	}
	return out
}

// rewriteIndex replaces the URLs of files in an index by those of the cache. Files
// of other servers keep their URLs, and clients ask these servers.
func (s *Service) rewriteIndex(page *url.URL, body []byte, contentType string) ([]byte, string, error) {
	if strings.HasPrefix(contentType, pypiJSON) || strings.HasPrefix(contentType, "application/json") {
		out, err := s.rewriteJSON(page, body)
		return out, pypiJSON, err
	}
	out, err := s.rewriteHTML(page, body)
	return out, "text/html; charset=utf-8", err
}

// fileURL returns the URL of a file in the cache, and false for a file that is not
// cached.
func (s *Service) fileURL(page *url.URL, ref, sha256 string) (string, bool) {
	u, err := page.Parse(ref)
	if err != nil || u.Scheme != page.Scheme || u.RawQuery != "" || u.User != nil || path.Clean(u.Path) != u.Path || !slices.Contains(s.pypiHosts(), hostPort(u)) {
		return "", false
	}
	sum := "none"
	if hash, ok := strings.CutPrefix(u.Fragment, "sha256="); ok && sha256 == "" {
		sha256 = hash
	}
	if d, ok := parseDigest("sha256:" + sha256); ok {
		sum = d.String()
	}
	out := url.URL{Path: guestapi.PathCache + string(PyPI) + "/files/" + sum + "/" + hostPort(u) + u.Path, Fragment: u.Fragment}
	return s.cfg.Base + out.String(), true
}

func (s *Service) rewriteJSON(page *url.URL, body []byte) ([]byte, error) {
	var index map[string]json.RawMessage
	var files []map[string]json.RawMessage
	err := json.Unmarshal(body, &index)
	if err == nil {
		err = json.Unmarshal(index["files"], &files)
	}
	if err != nil {
		return nil, agentlab.Errorf(agentlab.CodeUnavailable, "the index of the upstream is not valid: %w", err)
	}
	for _, f := range files {
		var ref string
		var hashes map[string]string
		if json.Unmarshal(f["url"], &ref) != nil {
			continue
		}
		_ = json.Unmarshal(f["hashes"], &hashes)
		if to, ok := s.fileURL(page, ref, hashes["sha256"]); ok {
			f["url"], _ = json.Marshal(to)
		} else if abs, err := page.Parse(ref); err == nil {
			f["url"], _ = json.Marshal(abs.String())
		}
	}
	if index["files"], err = json.Marshal(files); err != nil {
		return nil, err
	}
	return json.Marshal(index)
}

func (s *Service) rewriteHTML(page *url.URL, body []byte) ([]byte, error) {
	var out bytes.Buffer
	z := html.NewTokenizer(bytes.NewReader(body))
	z.SetMaxBuf(1 << 20)
	for {
		switch kind := z.Next(); kind {
		case html.ErrorToken:
			if z.Err() == io.EOF { //nolint:errorlint // the tokenizer returns exactly this
				return out.Bytes(), nil
			}
			return nil, agentlab.Errorf(agentlab.CodeUnavailable, "the index of the upstream is not valid: %w", z.Err())
		case html.StartTagToken, html.SelfClosingTagToken:
			t := z.Token()
			for i, a := range t.Attr {
				if t.Data != "a" || a.Key != "href" {
					continue
				}
				if to, ok := s.fileURL(page, a.Val, ""); ok {
					t.Attr[i].Val = to
				} else if abs, err := page.Parse(a.Val); err == nil {
					t.Attr[i].Val = abs.String()
				}
			}
			if t.Data == "base" {
				continue // relative URLs are replaced
			}
			out.WriteString(t.String())
		default:
			out.Write(z.Raw())
		}
	}
}
