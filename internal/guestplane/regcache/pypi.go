package regcache

import (
	"bytes"
	"encoding/json"
	"io"
	"net"
	"net/url"
	"path"
	"slices"
	"strings"

	"golang.org/x/net/html"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/guestapi"
	"github.com/agentlab-vm/agentlab/internal/guestplane/outside"
)

// pypiHosts returns the HOST:PORT of the servers whose files are cached.
func (s *Service) pypiHosts() []string {
	out := []string{outside.HostPort(s.upstreams[PyPI])}
	for _, h := range s.cfg.PyPIFiles {
		if _, _, err := net.SplitHostPort(h); err != nil {
			h = outside.HostPort(&url.URL{Scheme: s.upstreams[PyPI].Scheme, Host: h})
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
	if err != nil || u.Scheme != page.Scheme || u.RawQuery != "" || u.User != nil || path.Clean(u.Path) != u.Path || !slices.Contains(s.pypiHosts(), outside.HostPort(u)) {
		return "", false
	}
	sum := "none"
	if hash, ok := strings.CutPrefix(u.Fragment, "sha256="); ok && sha256 == "" {
		sha256 = hash
	}
	if d, ok := parseDigest("sha256:" + sha256); ok {
		sum = d.String()
	}
	out := url.URL{Path: guestapi.PathCache + string(PyPI) + "/files/" + sum + "/" + outside.HostPort(u) + u.Path, Fragment: u.Fragment}
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
