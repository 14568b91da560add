package server

import "strings"

// OpenAPI returns the OpenAPI 3.1 document of the API as YAML.
func (s *Server) OpenAPI() ([]byte, error) { return s.api.OpenAPI().YAML() }

// documented is a path of the mux as OpenAPI writes it, which has no sign for
// a parameter that may hold slashes.
func documented(path string) string { return strings.Replace(path, "...}", "}", 1) }

// documentPaths gives the paths of the document OpenAPI's form.
func (s *Server) documentPaths() {
	paths := s.api.OpenAPI().Paths
	for path, item := range paths {
		if want := documented(path); want != path {
			delete(paths, path)
			paths[want] = item
		}
	}
}
