package pvenode

import (
	"bufio"
	"crypto/rand"
	"crypto/rsa"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"io"
	"log/slog"
	"math/big"
	"mime/multipart"
	"net"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/agentlab-vm/agentlab/test/guard"
)

// maxBody is the largest body that the real server takes.
const maxBody = 512 << 10

// restServer is the REST face. It writes its answers itself, since the reason
// phrase is where the real one says what is wrong.
type restServer struct {
	n           *Node
	srv         *http.Server
	listener    net.Listener
	caPEM       []byte
	leafPEM     []byte
	fingerprint string
	caFile      string
	cluster     string // the UUID in the name of the cluster's authority

	caFingerprint       string
	notBefore, notAfter int64
}

func (n *Node) serveREST() error {
	s := &restServer{n: n}
	cert, err := s.certificate(n.name)
	if err != nil {
		return err
	}
	s.caFile = n.HostPath("/etc/pve/pve-root-ca.pem")
	if err := writeFile(s.caFile, s.caPEM, 0o644); err != nil {
		return err
	}
	l, err := n.listen()
	if err != nil {
		return err
	}
	s.listener = l
	s.srv = &http.Server{
		Handler: s, IdleTimeout: 5 * time.Second, ReadHeaderTimeout: 30 * time.Second,
		TLSConfig:    &tls.Config{Certificates: []tls.Certificate{cert}, MinVersion: tls.VersionTLS12, NextProtos: []string{"http/1.1"}},
		TLSNextProto: map[string]func(*http.Server, *tls.Conn, http.Handler){},
		ErrorLog:     slog.NewLogLogger(slog.DiscardHandler, slog.LevelDebug),
	}
	n.rest = s
	go func() { _ = s.srv.ServeTLS(l, "", "") }()
	return nil
}

func (s *restServer) addr() string { return s.listener.Addr().String() }

func (s *restServer) close() { _ = s.srv.Close() }

// CAFile returns the file with the certificate of the cluster's own authority.
func (n *Node) CAFile() string { return n.rest.caFile }

// Fingerprint returns the SHA-256 fingerprint of the node's certificate, in
// upper case with colons.
func (n *Node) Fingerprint() string { return n.rest.fingerprint }

// caKey and leafKey are the same for all nodes of a process: new keys for each of
// them would be most of what many tests compute. The certificates differ.
var caKey, leafKey = sync.OnceValues(newKey), sync.OnceValues(newKey)

func newKey() (*rsa.PrivateKey, error) { return rsa.GenerateKey(rand.Reader, 2048) }

func (s *restServer) certificate(node string) (tls.Certificate, error) {
	caKey, err := caKey()
	if err != nil {
		return tls.Certificate{}, err
	}
	key, err := leafKey()
	if err != nil {
		return tls.Certificate{}, err
	}
	s.cluster = newUUID()
	from, to := time.Now().Add(-24*time.Hour), time.Now().Add(2*365*24*time.Hour)
	ca := &x509.Certificate{
		SerialNumber: big.NewInt(1), NotBefore: from, NotAfter: to, IsCA: true, BasicConstraintsValid: true,
		Subject: pkix.Name{CommonName: "Proxmox Virtual Environment", OrganizationalUnit: []string{s.cluster}, Organization: []string{"PVE Cluster Manager CA"}},
	}
	caDER, err := x509.CreateCertificate(rand.Reader, ca, ca, &caKey.PublicKey, caKey)
	if err != nil {
		return tls.Certificate{}, err
	}
	leaf := &x509.Certificate{
		SerialNumber: big.NewInt(2), NotBefore: from, NotAfter: to,
		Subject:     pkix.Name{CommonName: node, OrganizationalUnit: []string{"PVE Cluster Node"}, Organization: []string{"Proxmox Virtual Environment"}},
		DNSNames:    []string{"localhost", node},
		IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1), net.IPv6loopback, net.IPv4(192, 0, 2, 10)},
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
	}
	der, err := x509.CreateCertificate(rand.Reader, leaf, ca, &key.PublicKey, caKey)
	if err != nil {
		return tls.Certificate{}, err
	}
	s.caPEM = pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: caDER})
	s.leafPEM = pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})
	s.fingerprint, s.caFingerprint = fingerprint(der), fingerprint(caDER)
	s.notBefore, s.notAfter = from.Unix(), to.Unix()
	return tls.Certificate{Certificate: [][]byte{der, caDER}, PrivateKey: key}, nil
}

func fingerprint(der []byte) string {
	sum := sha256.Sum256(der)
	parts := make([]string, len(sum))
	for i, b := range sum {
		parts[i] = fmt.Sprintf("%02X", b)
	}
	return strings.Join(parts, ":")
}

// ServeHTTP answers one request in the order of the real server: its shape,
// who sends it, what it asks for.
func (s *restServer) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	fault := func(status int, text string) {
		s.answer(w, r, Response{Err: &Error{Status: status, Message: text}}, true)
	}
	switch {
	case r.Method != http.MethodGet && r.Method != http.MethodPost && r.Method != http.MethodPut && r.Method != http.MethodDelete:
		fault(http.StatusNotImplemented, "method '"+r.Method+"' not available")
		return
	case len(r.TransferEncoding) > 0:
		fault(http.StatusNotImplemented, "chunked transfer encoding not supported")
		return
	case !strings.HasPrefix(r.URL.Path, "/api2/"):
		fault(http.StatusNotImplemented, "no such uri")
		return
	}
	name, tok, bad := s.n.authenticate(r.Header)
	if bad != "" {
		t := time.NewTimer(s.n.cfg.Waits.Unauthorized)
		defer t.Stop()
		select {
		case <-t.C:
		case <-r.Context().Done():
		}
		fault(http.StatusUnauthorized, bad)
		return
	}
	params, e := s.read(r)
	if e != nil {
		s.answer(w, r, Response{Err: e}, true)
		return
	}
	format, path, _ := strings.Cut(strings.TrimPrefix(r.URL.Path, "/api2/"), "/")
	if format != "json" && format != "extjs" {
		fault(http.StatusNotImplemented, "no formatter for uri /, "+format)
		return
	}
	who := name
	if tok != "" {
		who += "!" + tok
	}
	s.invoke(w, r, Request{Method: r.Method, Path: "/" + strings.TrimSuffix(path, "/"), Params: params, User: who})
}

// invoke carries the request out. pveproxy gives up after 30 seconds, while
// the work continues; the work does not end when the client leaves either.
func (s *restServer) invoke(w http.ResponseWriter, r *http.Request, req Request) {
	done := make(chan Response, 1)
	s.n.workers.Go(func() { done <- s.n.Invoke(s.n.ctx, req) })
	t := time.NewTimer(s.n.cfg.Waits.Proxy)
	defer t.Stop()
	select {
	case resp := <-done:
		if resp.Err == errLost {
			cut(w)
			return
		}
		s.answer(w, r, resp, resp.Err != nil && resp.Err.Status >= 595)
	case <-t.C:
		s.answer(w, r, Response{Err: &Error{Status: 596, Message: "Connection timed out"}}, true)
	case <-s.n.ctx.Done():
		cut(w)
	}
}

// cut ends the connection without an answer.
func cut(w http.ResponseWriter) {
	if h, ok := w.(http.Hijacker); ok {
		if conn, _, err := h.Hijack(); err == nil {
			_ = conn.Close()
			return
		}
	}
	panic(http.ErrAbortHandler)
}

// read reads the parameters of a request, and refuses its shape as the real
// server does. Those of the path's query win over those of the body.
func (s *restServer) read(r *http.Request) (map[string][]string, *Error) {
	params := decodeForm(r.URL.RawQuery)
	if r.ContentLength <= 0 {
		return params, nil
	}
	if r.Method != http.MethodPut && r.Method != http.MethodPost {
		return nil, &Error{Status: 501, Message: fmt.Sprintf("Unexpected content for method '%s'", r.Method)}
	}
	ctype, _, _ := strings.Cut(r.Header.Get("Content-Type"), ";")
	if ctype == "multipart/form-data" && strings.HasSuffix(r.URL.Path, "/upload") {
		return s.readUpload(r, params)
	}
	switch {
	case r.ContentLength > maxBody:
		return nil, &Error{Status: 501, Message: "for data too large"}
	case ctype != "" && ctype != "application/x-www-form-urlencoded" && ctype != "application/json":
		return nil, &Error{Status: 506, Message: fmt.Sprintf("upload 'Content-Type '%s' not implemented", ctype)}
	}
	raw, err := io.ReadAll(io.LimitReader(r.Body, maxBody))
	if err != nil {
		return nil, &Error{Status: 400, Message: "bad request"}
	}
	body := decodeForm(string(raw))
	if ctype == "application/json" {
		if body, err = decodeJSON(raw); err != nil {
			return nil, &Error{Status: 500, Message: "malformed JSON string"}
		}
	}
	for k, v := range params {
		body[k] = v
	}
	return body, nil
}

// readUpload keeps the file of an upload aside, and reads the fields that
// stand before it.
func (s *restServer) readUpload(r *http.Request, params map[string][]string) (map[string][]string, *Error) {
	parts, err := r.MultipartReader()
	for err == nil {
		var part *multipart.Part
		if part, err = parts.NextPart(); err != nil {
			break
		}
		if part.FileName() == "" {
			b, _ := io.ReadAll(io.LimitReader(part, 4096))
			params[part.FormName()] = []string{strings.TrimSpace(string(b))}
			continue
		}
		if part.FormName() != "filename" {
			return nil, dief("wrong field name '%s' for file upload, expected 'filename'", part.FormName())
		}
		tmp := "/var/tmp/pveupload-" + strings.ReplaceAll(newUUID(), "-", "")
		b, _ := io.ReadAll(part)
		if err := writeFile(s.n.HostPath(tmp), b, 0o600); err != nil {
			return nil, dief("unable to create temporary upload file '%s'", tmp)
		}
		params["filename"], params["tmpfilename"] = []string{part.FileName()}, []string{tmp}
		return params, nil
	}
	return nil, dief("upload failed")
}

// decodeForm reads pairs that are separated by "&" or ";", with "+" for a
// blank.
func decodeForm(s string) map[string][]string {
	out := map[string][]string{}
	for _, pair := range strings.FieldsFunc(s, func(r rune) bool { return r == '&' || r == ';' }) {
		k, v, _ := strings.Cut(pair, "=")
		k = unescape(k)
		out[k] = append(out[k], unescape(v))
	}
	return out
}

func unescape(s string) string {
	if u, err := url.QueryUnescape(s); err == nil {
		return u
	}
	return s
}

// decodeJSON reads an object whose values may be of any simple type.
func decodeJSON(body []byte) (map[string][]string, error) {
	dec := json.NewDecoder(strings.NewReader(string(body)))
	dec.UseNumber()
	var m map[string]any
	if err := dec.Decode(&m); err != nil {
		return nil, err
	}
	out := map[string][]string{}
	for k, v := range m {
		list, ok := v.([]any)
		if !ok {
			list = []any{v}
		}
		for _, item := range list {
			switch t := item.(type) {
			case bool:
				out[k] = append(out[k], map[bool]string{true: "1", false: "0"}[t])
			case nil:
			default:
				out[k] = append(out[k], fmt.Sprint(t))
			}
		}
	}
	return out, nil
}

// answer writes a response with its reason phrase. Without a body are answers
// of the server itself rather than of the API.
func (s *restServer) answer(w http.ResponseWriter, r *http.Request, resp Response, bare bool) {
	status, reason := 200, "OK"
	if resp.Err != nil {
		status = resp.Err.Status
		reason, _, _ = strings.Cut(resp.Err.Message, "\n")
	}
	var body []byte
	if !bare {
		body = encodeBody(resp, s.n.cfg.BareFaults)
	}
	if resp.Err == nil {
		w.Header().Set("Content-Type", "application/json;charset=UTF-8")
		w.Header().Set("Server", "pve-api-daemon/3.0")
		_, _ = w.Write(body)
		return
	}
	h, ok := w.(http.Hijacker)
	if !ok {
		w.WriteHeader(status)
		return
	}
	conn, buf, err := h.Hijack()
	if err != nil {
		return
	}
	s.write(conn, buf, status, reason, body)
}

func encodeBody(resp Response, bare bool) []byte {
	m := map[string]any{"data": resp.Data}
	if resp.Err != nil {
		m["data"] = nil
		if len(resp.Err.Params) > 0 {
			m["errors"] = resp.Err.Params
		}
	}
	if resp.Err != nil && !bare {
		m["message"] = resp.Err.Message + "\n"
		if resp.Err.Status == 501 {
			m["message"] = resp.Err.Message
		}
	}
	if resp.Total != nil && resp.Err == nil {
		m["total"] = *resp.Total
	}
	b, err := json.Marshal(m)
	if err != nil {
		return []byte(`{"data":null}`)
	}
	return b
}

// write writes a fault, after which the connection closes.
func (s *restServer) write(conn net.Conn, buf *bufio.ReadWriter, status int, reason string, body []byte) {
	defer conn.Close()
	head := "HTTP/1.1 " + strconv.Itoa(status) + " " + reason + "\r\nCache-Control: max-age=0\r\nConnection: close\r\n" +
		"Date: " + time.Now().UTC().Format(http.TimeFormat) + "\r\nPragma: no-cache\r\nServer: pve-api-daemon/3.0\r\n" +
		"Content-Length: " + strconv.Itoa(len(body)) + "\r\n"
	if len(body) > 0 {
		head += "Content-Type: application/json;charset=UTF-8\r\n"
	}
	_ = conn.SetWriteDeadline(time.Now().Add(guard.Patience))
	_, _ = buf.WriteString(head + "\r\n")
	_, _ = buf.Write(body)
	_ = buf.Flush()
}
