package metrics

import (
	"crypto/sha256"
	"crypto/subtle"
	"io"
	"log/slog"
	"net/http"
	"os"
	"strings"
	"time"

	"github.com/agentlab-vm/agentlab"
)

// Lengths of a token, in bytes.
const (
	minToken = 32
	maxToken = 256
)

// ReadToken reads the token of the port for Prometheus. Other users must not be able
// to read the file. Codes: denied, invalid.
func ReadToken(path string) (string, error) {
	bad := func(code agentlab.Code, format string, args ...any) error {
		return agentlab.Errorf(code, format, args...).WithField("metrics.token_file").
			WithHint("create it: (umask 077; openssl rand -hex 32 > %s)", path)
	}
	f, err := os.Open(path)
	if err != nil {
		return "", bad(agentlab.CodeInvalid, "cannot read the token of the metrics: %w", err)
	}
	defer f.Close()
	st, err := f.Stat()
	switch {
	case err != nil:
		return "", bad(agentlab.CodeInvalid, "cannot read the token of the metrics: %w", err)
	case !st.Mode().IsRegular():
		return "", bad(agentlab.CodeInvalid, "%s is not a regular file", path)
	case st.Mode().Perm()&0o077 != 0:
		return "", bad(agentlab.CodeDenied, "%s is accessible to other users (mode %04o)", path, st.Mode().Perm())
	}
	data, err := io.ReadAll(io.LimitReader(f, maxToken+2))
	if err != nil {
		return "", bad(agentlab.CodeInvalid, "cannot read the token of the metrics: %w", err)
	}
	token := strings.TrimSuffix(string(data), "\n")
	if len(token) < minToken || len(token) > maxToken || strings.ContainsFunc(token, func(r rune) bool { return r <= ' ' || r > '~' }) {
		return "", bad(agentlab.CodeInvalid, "%s does not contain one line of %d to %d printable characters", path, minToken, maxToken)
	}
	return token, nil
}

// Server returns a server that answers GET /metrics to clients that send the token
// as 'Authorization: Bearer TOKEN', and nothing to others.
func (s *Set) Server(token string) *http.Server {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /metrics", func(w http.ResponseWriter, r *http.Request) {
		text, err := s.Text(r.Context())
		if err != nil {
			s.cfg.Logger.Error("the metrics could not be read", "err", err)
			http.Error(w, "the metrics could not be read; see 'agentlab daemon logs'", http.StatusInternalServerError)
			return
		}
		w.Header().Set("Content-Type", ContentType)
		_, _ = w.Write(text)
	})
	want := sha256.Sum256([]byte(token))
	return &http.Server{
		Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			sent, ok := strings.CutPrefix(r.Header.Get("Authorization"), "Bearer ")
			have := sha256.Sum256([]byte(sent))
			if token == "" || !ok || subtle.ConstantTimeCompare(have[:], want[:]) != 1 {
				w.Header().Set("WWW-Authenticate", "Bearer")
				w.Header().Set("Connection", "close")
				http.Error(w, "the token is missing or wrong", http.StatusUnauthorized)
				return
			}
			mux.ServeHTTP(w, r)
		}),
		ReadHeaderTimeout: 10 * time.Second, ReadTimeout: 10 * time.Second, WriteTimeout: 30 * time.Second, IdleTimeout: 2 * time.Minute,
		MaxHeaderBytes: 16 << 10,
		ErrorLog:       slog.NewLogLogger(s.cfg.Logger.Handler(), slog.LevelDebug),
	}
}
