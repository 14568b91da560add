package regcache

import (
	"context"
	"crypto/sha256"
	"crypto/sha512"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"hash"
	"io"
	"net/http"
	"net/url"
	"path"
	"strings"

	"github.com/agentlab-vm/agentlab/internal/guestplane/outside"
)

// digest is the expected digest of a content. The zero digest expects nothing.
type digest struct{ algorithm, hex string }

// parseDigest reads ALGORITHM:HEX.
func parseDigest(text string) (digest, bool) {
	algorithm, sum, _ := strings.Cut(text, ":")
	d := digest{algorithm, sum}
	raw, err := hex.DecodeString(sum)
	ok := err == nil && strings.ToLower(sum) == sum && (algorithm == "sha256" && len(raw) == sha256.Size || algorithm == "sha512" && len(raw) == sha512.Size)
	return d, ok
}

// String returns ALGORITHM:HEX.
func (d digest) String() string { return d.algorithm + ":" + d.hex }

func (d digest) hash() hash.Hash {
	if d.algorithm == "sha512" {
		return sha512.New()
	}
	return sha256.New()
}

// verifier reads a content. It holds the last byte back until all others were read, and
// returns it only if the digest is right.
type verifier struct {
	r    io.Reader
	sum  hash.Hash
	want digest
	last []byte
}

// Read implements io.Reader. p has more than one byte.
func (v *verifier) Read(p []byte) (int, error) {
	k := copy(p, v.last)
	n, err := v.r.Read(p[k:])
	_, _ = v.sum.Write(p[k : k+n])
	n += k
	if errors.Is(err, io.EOF) {
		if got := hex.EncodeToString(v.sum.Sum(nil)); v.want.hex != "" && got != v.want.hex {
			return 0, fmt.Errorf("the digest of the content is %s, not %s: it is not used", got, v.want.hex)
		}
		return n, io.EOF
	}
	if n > 0 {
		n--
		v.last = append(v.last[:0], p[n])
	}
	return n, err
}

// tarballDigest returns the digest of a tarball of npm from the index of its package,
// the zero digest if the index does not have it.
func (s *Service) tarballDigest(ctx context.Context, g *outside.Guest, t *target) digest {
	index := &target{kind: NPM, url: npmIndex(s.upstreams[NPM], t.tarball[0]), accept: npmShort}
	resp, _, err := s.fetch(ctx, g, index, http.MethodGet, http.Header{})
	if err != nil {
		return digest{}
	}
	defer func() { _ = resp.Body.Close() }()
	dec := json.NewDecoder(io.LimitReader(resp.Body, maxIndex))
	var found digest
	_ = members(dec, func(key string) error {
		if key != "versions" {
			return dec.Decode(&json.RawMessage{})
		}
		return members(dec, func(string) error {
			var v struct {
				Dist struct{ Tarball, Integrity string }
			}
			if err := dec.Decode(&v); err != nil {
				return err
			}
			if u, err := url.Parse(v.Dist.Tarball); err == nil && path.Base(u.Path) == t.tarball[1] {
				found = integrity(v.Dist.Integrity)
				return io.EOF // the rest is not needed
			}
			return nil
		})
	})
	return found
}

// members calls fn for each member of a JSON object. fn reads its value.
func members(dec *json.Decoder, fn func(key string) error) error {
	if open, err := dec.Token(); err != nil || open != json.Delim('{') {
		return errors.Join(err, errors.New("no JSON object"))
	}
	for dec.More() {
		key, err := dec.Token()
		if err == nil {
			err = fn(key.(string))
		}
		if err != nil {
			return err
		}
	}
	_, err := dec.Token()
	return err
}

// integrity returns the SHA-512 of a subresource integrity text.
func integrity(text string) digest {
	for _, one := range strings.Fields(text) {
		sum, ok := strings.CutPrefix(one, "sha512-")
		raw, err := base64.StdEncoding.DecodeString(sum)
		if d, valid := parseDigest("sha512:" + hex.EncodeToString(raw)); ok && err == nil && valid {
			return d
		}
	}
	return digest{}
}
