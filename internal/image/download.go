package image

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"time"

	"github.com/agentlab-vm/agentlab"
)

// Limits of downloads.
const (
	maxDownload     = 2 << 30             // bytes of one file
	downloadTimeout = 30 * time.Minute    // of one file
	downloadsUnused = 30 * 24 * time.Hour // after which the cache drops a file
)

// downloadsDir is the cache of downloads in a store's root. Its files are named
// by their SHA-256.
const downloadsDir = ".downloads"

// fetch writes the file at f.URL to path. A file with another SHA-256 than
// f.SHA256 is an error with code denied. cache is a directory of earlier
// downloads, "" for none.
func (f File) fetch(ctx context.Context, path, cache string) error {
	cached := filepath.Join(cache, f.SHA256)
	if src, err := os.Open(cached); cache != "" && err == nil {
		defer func() { _ = src.Close() }()
		if sum, err := save(path, src); err == nil && sum == f.SHA256 {
			touch(cached)
			return nil
		}
		_ = os.Remove(cached) // damaged
	}
	sum, err := get(ctx, f.URL, path)
	switch {
	case err != nil:
		return err
	case sum != f.SHA256:
		_ = os.Remove(path)
		return downloadError(agentlab.CodeDenied, "%s has the SHA-256 %s, not the one in the recipe", f.URL, sum)
	}
	if cache != "" {
		// A build does not fail because of the cache.
		_ = os.MkdirAll(cache, 0o700)
		_ = os.Link(path, cached)
	}
	return nil
}

// touch marks a cached file as used, so that no sweep removes it soon.
func touch(path string) {
	now := time.Now()
	_ = os.Chtimes(path, now, now)
}

// open starts a download.
func open(ctx context.Context, url string) (io.ReadCloser, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return nil, err
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return nil, err
	}
	if resp.StatusCode != http.StatusOK {
		_ = resp.Body.Close()
		return nil, fmt.Errorf("%s: the server answers %s", url, resp.Status)
	}
	return resp.Body, nil
}

// get writes the file at url to path and returns its SHA-256.
func get(ctx context.Context, url, path string) (sum string, err error) {
	ctx, cancel := context.WithTimeout(ctx, downloadTimeout)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return "", err
	}
	// The SHA-256 is that of the file as the server has it.
	req.Header.Set("Accept-Encoding", "identity")
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return "", downloadError(agentlab.CodeUnavailable, "cannot download %s: %w", url, err)
	}
	defer func() { _ = resp.Body.Close() }()
	if resp.StatusCode != http.StatusOK {
		code := agentlab.CodeUnavailable
		if resp.StatusCode/100 == 4 {
			code = agentlab.CodeInvalid
		}
		return "", downloadError(code, "cannot download %s: the server answers %s", url, resp.Status)
	}
	sum, err = save(path, resp.Body)
	_, local := errors.AsType[*os.PathError](err)
	switch {
	case errors.Is(err, errTooLarge):
		return "", downloadError(agentlab.CodeInvalid, "cannot download %s: %w", url, err)
	case err != nil && !local:
		return "", downloadError(agentlab.CodeUnavailable, "cannot download %s: %w", url, err)
	}
	return sum, err
}

func downloadError(code agentlab.Code, format string, args ...any) error {
	return agentlab.Errorf(code, format, args...).WithField("files").WithHint("check url and sha256 of the file in the recipe, and the network of this machine")
}

var errTooLarge = errors.New("the file has more than 2 GiB")

// save writes what r returns to path, durably, and returns its SHA-256.
func save(path string, r io.Reader) (sum string, err error) {
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o644)
	if err != nil {
		return "", err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	h := sha256.New()
	n, err := io.Copy(io.MultiWriter(f, h), io.LimitReader(r, maxDownload+1))
	if err != nil {
		return "", err
	}
	if n > maxDownload {
		return "", errTooLarge
	}
	return hex.EncodeToString(h.Sum(nil)), f.Sync()
}

// sweepDownloads removes cached downloads that no build has used for a while.
func (s *Store) sweepDownloads() {
	dir := filepath.Join(s.root, downloadsDir)
	entries, _ := os.ReadDir(dir) // none if it does not exist
	for _, e := range entries {
		if info, err := e.Info(); err == nil && s.opts.Now().Sub(info.ModTime()) > downloadsUnused {
			_ = os.Remove(filepath.Join(dir, e.Name()))
		}
	}
}
